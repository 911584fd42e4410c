"""The operations in float64 NumPy, written from the formulas: slow, for tests. Shares no code with the backends."""

import numpy as np


def paired_decode_attention(q_ctx, q_out, k_cache, v_cache, lengths, *, window, **scales):
    """o_ctx and o_out [B, N, H]; arguments as in `api.paired_decode_attention`."""
    return (
        decode_attention(q_ctx, k_cache, v_cache, lengths, window=window, **scales),
        decode_attention(q_out, k_cache, v_cache, lengths, window=None, **scales),
    )


def decode_attention(q, k_cache, v_cache, lengths, *, window=None, k_scale=None, v_scale=None, scale=None):
    """Output [B, N, H]; arguments as in `api.decode_attention`."""
    q = np.asarray(q, np.float64)
    batch, num_heads, head_size = q.shape
    num_kv_heads = k_cache.shape[1]
    scale = head_size**-0.5 if scale is None else scale
    out = np.zeros_like(q)
    for b in range(batch):
        start = 0 if window is None else max(lengths[b] - window, 0)
        for n in range(num_heads):
            head = n // (num_heads // num_kv_heads)
            keys = np.asarray(k_cache[b, head, start : lengths[b]], np.float64)
            values = np.asarray(v_cache[b, head, start : lengths[b]], np.float64)
            if k_scale is not None and v_scale is not None:
                keys, values = keys * float(k_scale[b, head]), values * float(v_scale[b, head])
            if len(keys) > 0:
                scores = scale * keys @ q[b, n]
                weights = np.exp(scores - scores.max())
                out[b, n] = weights @ values / weights.sum()
    return out
