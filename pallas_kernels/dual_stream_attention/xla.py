"""Blockwise attention in plain XLA operations: runs on every platform, memory linear in T.

Each block of query rows visits only the key blocks between its least start and greatest end, with an online
softmax (arXiv:2112.05682; arXiv:2307.08691, algorithms 1 and 2). The forward pass keeps the log-sum-exp of
every row, the backward pass recomputes the probabilities from it. All streams share one backward pass, so
that dk and dv are summed in float32 over the streams and over the query heads of a group before they are
rounded once.

Letters as in `jax.nn.dot_product_attention`, G = N / K; blocks are a leading axis: queries
[blocks, B, K, G, rows, H], keys and values [blocks, B, K, keys, H].
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.dispatch import target_device
from pallas_kernels.dual_stream_attention.mask import KeyRange, Stream, key_ranges


def unsupported(
    streams: tuple[Stream, ...], k: jax.Array, segment_ids: jax.Array | None, deterministic: bool
) -> str | None:
    """Reason why this backend cannot do the call: there is none."""
    del streams, k, segment_ids, deterministic


def attention(
    streams: tuple[Stream, ...], k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, scale: float
) -> tuple[jax.Array, ...]:
    """Output [B, P, N, H] of each stream over k, v [B, T, K, H]."""
    ranges = tuple(
        key_ranges(k.shape[1], window=s.window, segment_ids=segment_ids, out_index=s.out_index) for s in streams
    )
    return _attention(tuple(s.q for s in streams), k, v, ranges, scale)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(queries, k, v, ranges, scale):
    return _attention_fwd(queries, k, v, ranges, scale)[0]


def _attention_fwd(queries, k, v, ranges, scale):
    outputs, lses = [], []
    for q, key_range in zip(queries, ranges, strict=True):
        out, lse = _stream_forward(q, _key_blocks(k), _key_blocks(v), key_range, scale)
        outputs.append(checkpoint_name(out, "attention_output"))
        lses.append(checkpoint_name(lse, "attention_lse"))
    return tuple(outputs), (queries, k, v, ranges, tuple(outputs), tuple(lses))


def _attention_bwd(scale, residuals, d_outputs):
    queries, k, v, ranges, outputs, lses = residuals
    k_blocks, v_blocks = _key_blocks(k), _key_blocks(v)
    dk = dv = jnp.zeros_like(_loop_zero((queries, k, v, ranges)), shape=k_blocks.shape)
    d_queries = []
    for stream in zip(queries, ranges, outputs, lses, d_outputs, strict=True):
        dq, dk, dv = _stream_backward(*stream, k_blocks, v_blocks, dk, dv, scale)
        d_queries.append(dq)
    return tuple(d_queries), _from_key_blocks(dk * scale, k), _from_key_blocks(dv, v), None


_attention.defvjp(_attention_fwd, _attention_bwd)


def _stream_forward(q, k_blocks, v_blocks, key_range, scale):
    num_key_blocks, _, num_kv_heads, block, _ = k_blocks.shape
    zero = _loop_zero((q, k_blocks, v_blocks, key_range))

    def query_block(_, args):
        q_block, start, end = args

        def key_block(j, carry):
            row_max, row_sum, acc = carry
            scores = _masked_scores(q_block, k_blocks[j], start, end, j * block, scale)
            new_max = jnp.maximum(row_max, scores.max(axis=-1))
            # A row that has seen no key yet keeps its maximum at -inf: exp must not meet -inf - (-inf).
            finite_max = jnp.where(new_max == -jnp.inf, 0.0, new_max)
            decay = jnp.exp(row_max - finite_max)
            weights = jnp.exp(scores - finite_max[..., None])
            acc = acc * decay[..., None] + _dot("bkgqs,bksh->bkgqh", weights.astype(v_blocks.dtype), v_blocks[j])
            return new_max, row_sum * decay + weights.sum(axis=-1), acc

        rows = q_block.shape[:-1]
        init = (
            jnp.full_like(zero, -jnp.inf, shape=rows),
            jnp.zeros_like(zero, shape=rows),
            jnp.zeros_like(zero, shape=q_block.shape),
        )
        row_max, row_sum, acc = _for_key_blocks(start, end, num_key_blocks, block, key_block, init)
        # A row that sees nothing has sum 0 and accumulator 0; its log-sum-exp only has to be finite.
        row_sum = jnp.where(row_sum == 0.0, 1.0, row_sum)
        row_max = jnp.where(row_max == -jnp.inf, 0.0, row_max)
        return None, ((acc / row_sum[..., None]).astype(q.dtype), row_max + jnp.log(row_sum))

    q_blocks, ranges = _query_blocks(q, num_kv_heads), _range_blocks(key_range)
    _, (out, lse) = lax.scan(query_block, None, (q_blocks, *ranges), unroll=len(q_blocks) == 1)
    return _from_query_blocks(out, q.shape), _from_query_blocks(lse, q.shape[:-1])


def _stream_backward(q, key_range, out, lse, d_out, k_blocks, v_blocks, dk, dv, scale):
    num_key_blocks, _, num_kv_heads, block, _ = k_blocks.shape
    zero = _loop_zero((q, k_blocks, v_blocks, key_range))

    def query_block(dkv, args):
        q_block, start, end, lse_block, delta_block, d_out_block = args

        def key_block(j, carry):
            dq, dk, dv = carry
            scores = _masked_scores(q_block, k_blocks[j], start, end, j * block, scale)
            weights = jnp.exp(scores - lse_block[..., None])
            d_weights = _dot("bkgqh,bksh->bkgqs", d_out_block, v_blocks[j])
            d_scores = (weights * (d_weights - delta_block[..., None])).astype(q.dtype)
            dq = dq + _dot("bkgqs,bksh->bkgqh", d_scores, k_blocks[j])
            dk = dk.at[j].add(_dot("bkgqs,bkgqh->bksh", d_scores, q_block))
            dv = dv.at[j].add(_dot("bkgqs,bkgqh->bksh", weights.astype(q.dtype), d_out_block))
            return dq, dk, dv

        init = (jnp.zeros_like(zero, shape=q_block.shape), *dkv)
        dq, dk, dv = _for_key_blocks(start, end, num_key_blocks, block, key_block, init)
        return (dk, dv), (dq * scale).astype(q.dtype)

    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    row_blocks = [_query_blocks(x, num_kv_heads) for x in (lse, delta, d_out)]
    q_blocks, ranges = _query_blocks(q, num_kv_heads), _range_blocks(key_range)
    (dk, dv), dq = lax.scan(query_block, (dk, dv), (q_blocks, *ranges, *row_blocks), unroll=len(q_blocks) == 1)
    return _from_query_blocks(dq, q.shape), dk, dv


def _masked_scores(q_block, k_block, start, end, first_key, scale):
    """Scores [B, K, G, rows, keys] in float32, -inf where the row does not see the key."""
    keys = first_key + jnp.arange(k_block.shape[-2], dtype=jnp.int32)
    visible = (start[..., None] <= keys) & (keys < end[..., None])
    return jnp.where(visible[:, None, None], _dot("bkgqh,bksh->bkgqs", q_block, k_block) * scale, -jnp.inf)


def _dot(spec, a, b):
    # Products of 16-bit inputs are exact in float32; those of float32 must not fall to TF32 or bfloat16
    # passes.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def _for_key_blocks(start, end, num_blocks, block, body, init):
    """Runs body(j, carry) over the key blocks that any row of the query block sees."""
    if num_blocks == 1:
        return body(0, init)
    visible = end > start
    first = jnp.where(visible, start, num_blocks * block).min() // block
    last = (jnp.where(visible, end, 0).max() + block - 1) // block
    return lax.fori_loop(first, last, body, init)


def _block_size(length):
    # On a CPU small blocks skip more of the mask and their products are no slower (measured: 64 to 256).
    return min(length, 64 if target_device().platform == "cpu" else 128)


def _key_blocks(x):
    batch, length, heads, size = x.shape
    block = _block_size(length)
    x = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    return x.reshape(batch, -1, block, heads, size).transpose(1, 0, 3, 2, 4)


def _from_key_blocks(x, like):
    batch, length, heads, size = like.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, -1, heads, size)[:, :length].astype(like.dtype)


def _query_blocks(x, num_kv_heads):
    """Splits [B, P, N, ...] into [blocks, B, K, G, rows, ...]; the rows that fill the last block are zero."""
    batch, length, heads, *rest = x.shape
    block = _block_size(length)
    x = jnp.pad(x, [(0, 0), (0, -length % block)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(batch, -1, block, num_kv_heads, heads // num_kv_heads, *rest)
    return jnp.moveaxis(x, (1, 0, 3, 4, 2), range(5))


def _from_query_blocks(x, shape):
    batch, length, heads, *rest = shape
    x = jnp.moveaxis(x, range(5), (1, 0, 3, 4, 2))
    return x.reshape(batch, -1, heads, *rest)[:, :length]


def _range_blocks(key_range: KeyRange):
    """Splits start and end [B, P] into [blocks, B, rows]; the rows that fill the last block see nothing."""
    batch, length = key_range.start.shape
    block = _block_size(length)
    padded = (jnp.pad(x, ((0, 0), (0, -length % block))) for x in key_range)
    return tuple(x.reshape(batch, -1, block).swapaxes(0, 1) for x in padded)


def _loop_zero(arrays):
    """Float32 zero that varies over each mesh axis of an enclosing shard_map over which an array does.

    A loop's carry must have from the start the type that it has after a step.
    """
    return sum(jnp.zeros_like(x, jnp.float32, shape=()) for x in jax.tree.leaves(arrays))
