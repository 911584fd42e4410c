"""The operations and their gradients in float64 NumPy, written from the formulas: slow, dense, for tests.

Shares no code with the backends, so that an error in `mask.key_ranges` cannot hide.
"""

import numpy as np


def visible_keys(batch, num_keys, *, window=None, segment_ids=None, out_index=None):
    """Bool [B, P, T]: query row p, at row t of the sequence, sees key j.

    That is when t - window < j <= t and segment_ids[t] == segment_ids[j] != 0, for 0 <= t < T.
    """
    if segment_ids is None:
        segment_ids = np.ones((batch, num_keys), int)
    if out_index is None:
        out_index = np.tile(np.arange(num_keys), (batch, 1))
    visible = np.zeros((batch, out_index.shape[1], num_keys), bool)
    key = np.arange(num_keys)
    for b in range(batch):
        for p, row in enumerate(out_index[b]):
            if not 0 <= row < num_keys or segment_ids[b, row] == 0:
                continue
            visible[b, p] = (key <= row) & (segment_ids[b] == segment_ids[b, row])
            if window is not None:
                visible[b, p] &= key > row - window
    return visible


def attention(q, k, v, visible, scale=None):
    """softmax(scale q k^T over visible keys) v: q [B, P, N, H], k, v [B, T, K, H], visible [B, P, T]."""
    weights = _weights(q, k, visible, scale)
    return np.einsum("bnpt,btnh->bpnh", weights, _per_query_head(v, q))


def attention_grad(q, k, v, d_out, visible, scale=None):
    """Gradients dq, dk, dv of sum(attention(q, k, v) * d_out)."""
    q, d_out = np.asarray(q, np.float64), np.asarray(d_out, np.float64)
    weights = _weights(q, k, visible, scale)
    d_weights = np.einsum("bpnh,btnh->bnpt", d_out, _per_query_head(v, q))
    d_scores = weights * (d_weights - np.sum(weights * d_weights, axis=-1, keepdims=True))
    d_products = d_scores * _scale(q, scale)
    dq = np.einsum("bnpt,btnh->bpnh", d_products, _per_query_head(k, q))
    dk = np.einsum("bnpt,bpnh->btnh", d_products, q)
    dv = np.einsum("bnpt,bpnh->btnh", weights, d_out)
    return dq, _sum_over_group(dk, k), _sum_over_group(dv, v)


def dual_stream_attention(q_ctx, q_out, k, v, *, window, out_window=None, segment_ids=None, out_index=None, scale=None):
    """o_ctx [B, T, N, H] and o_out [B, P, N, H]; arguments as in `api.dual_stream_attention`."""
    batch, num_keys = k.shape[:2]
    context = visible_keys(batch, num_keys, window=window, segment_ids=segment_ids)
    output = visible_keys(batch, num_keys, window=out_window, segment_ids=segment_ids, out_index=out_index)
    return attention(q_ctx, k, v, context, scale), attention(q_out, k, v, output, scale)


def dual_stream_attention_grad(
    q_ctx, q_out, k, v, d_ctx, d_out, *, window, out_window=None, segment_ids=None, out_index=None, scale=None
):
    """Gradients dq_ctx, dq_out, dk, dv of sum(o_ctx * d_ctx) + sum(o_out * d_out)."""
    batch, num_keys = k.shape[:2]
    context = visible_keys(batch, num_keys, window=window, segment_ids=segment_ids)
    output = visible_keys(batch, num_keys, window=out_window, segment_ids=segment_ids, out_index=out_index)
    dq_ctx, dk_ctx, dv_ctx = attention_grad(q_ctx, k, v, d_ctx, context, scale)
    dq_out, dk_out, dv_out = attention_grad(q_out, k, v, d_out, output, scale)
    return dq_ctx, dq_out, dk_ctx + dk_out, dv_ctx + dv_out


def _weights(q, k, visible, scale):
    q = np.asarray(q, np.float64)
    scores = np.einsum("bpnh,btnh->bnpt", q, _per_query_head(k, q)) * _scale(q, scale)
    scores = np.where(visible[:, None], scores, -np.inf)
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0.0, 1.0, total)


def _scale(q, scale):
    return q.shape[-1] ** -0.5 if scale is None else scale


def _per_query_head(x, q):
    x = np.asarray(x, np.float64)
    return np.repeat(x, q.shape[2] // x.shape[2], axis=2)


def _sum_over_group(dx, x):
    batch, num_keys, heads, size = x.shape
    return dx.reshape(batch, num_keys, heads, -1, size).sum(axis=3)
