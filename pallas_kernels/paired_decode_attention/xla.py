"""Decode attention in plain XLA operations: runs on every platform.

Goes over the cache in blocks with an online softmax (arXiv:2205.14135), from the first key that any row sees to the
longest length. A block is cut out of the cache where it lies, and only a block is ever converted to the queries'
type, so that no second copy of the cache exists.
"""

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK = 4096


def unsupported(q: jax.Array, k_cache: jax.Array) -> str | None:
    """Reason why this backend cannot do the call: there is none."""
    del q, k_cache


def attention(
    q: jax.Array,
    windows: tuple[int, ...],
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    scale: float,
) -> jax.Array:
    """Output [B, R, N, H] of rows q [B, R, N, H]; row r sees the last windows[r] of the keys [0, lengths)."""
    first = jnp.maximum(lengths[:, None] - jnp.asarray(windows, jnp.int32), 0)
    _, row_sum, acc = _sums(q, first, k_cache, v_cache, lengths, k_scale, scale)
    return _output(row_sum, acc, v_scale, q)


def attention_over_devices(
    q: jax.Array,
    first: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    scale: float,
    axis: str,
) -> jax.Array:
    """Output of rows that see keys of every device along a mesh axis, the same on each: one merge of the softmax sums.

    `first` [B, R] and `lengths` [B] bound the keys of the device's own cache, first <= key < length, that a row sees.
    """
    row_max, row_sum, acc = _sums(q, first, k_cache, v_cache, lengths, k_scale, scale)
    all_max = lax.pmax(row_max, axis)
    weight = jnp.exp(row_max - jnp.where(all_max == -jnp.inf, 0.0, all_max))
    row_sum, acc = lax.psum((row_sum * weight, acc * weight[..., None]), axis)
    return _output(row_sum, acc, v_scale, q)


def _sums(q, first, k_cache, v_cache, lengths, k_scale, scale):
    """Row maximum and sum of weights [B, K, R, G], weighted sum of stored values [B, K, R, G, H]."""
    batch, num_rows, _, head_size = q.shape
    num_kv_heads, capacity = k_cache.shape[1:3]
    block = min(_BLOCK, capacity)
    rows = q.reshape(batch, num_rows, num_kv_heads, -1, head_size).swapaxes(1, 2)
    score_scale = (scale * k_scale)[:, :, None, None, None]

    def step(j, carry):
        row_max, row_sum, acc = carry
        # The last block ends with the cache: it may begin with keys of the block before it.
        start = jnp.minimum(j * block, capacity - block)
        # The barrier ties the caches to the step. Without it XLA's CPU compiler of JAX 0.10, which cuts no bfloat16
        # arrays, converts the whole cache to float32 ahead of the loop.
        start, *caches = lax.optimization_barrier((start, k_cache, v_cache))
        k, v = (lax.dynamic_slice_in_dim(x, start, block, axis=2).astype(q.dtype) for x in caches)
        key = start + jnp.arange(block, dtype=jnp.int32)
        present = (j * block <= key) & (key < lengths[:, None])
        visible = present[:, None] & (first[..., None] <= key)
        # A weight of zero does not silence a NaN: values that nobody wrote must not take part.
        v = jnp.where(present[:, None, :, None], v, 0)
        scores = jnp.where(visible[:, None, :, None], _dot("bkrgh,bksh->bkrgs", rows, k) * score_scale, -jnp.inf)
        new_max = jnp.maximum(row_max, scores.max(axis=-1))
        # A row that has seen no key yet keeps its maximum at -inf: exp must not meet -inf - (-inf).
        finite_max = jnp.where(new_max == -jnp.inf, 0.0, new_max)
        decay = jnp.exp(row_max - finite_max)
        weights = jnp.exp(scores - finite_max[..., None])
        acc = acc * decay[..., None] + _dot("bkrgs,bksh->bkrgh", weights.astype(q.dtype), v)
        return new_max, row_sum * decay + weights.sum(axis=-1), acc

    # A loop's carry must vary from the start over the mesh axes over which it varies after a step.
    operands = (q, k_cache, v_cache, lengths, k_scale)
    zero = sum(jnp.zeros_like(x, jnp.float32, shape=()) for x in operands)
    init = (
        jnp.full_like(zero, -jnp.inf, shape=rows.shape[:-1]),
        jnp.zeros_like(zero, shape=rows.shape[:-1]),
        jnp.zeros_like(zero, shape=rows.shape),
    )
    last_block = (jnp.minimum(lengths.max(), capacity) + block - 1) // block
    return lax.fori_loop(first.min() // block, last_block, step, init)


def _output(row_sum, acc, v_scale, q):
    out = acc * v_scale[:, :, None, None, None] / jnp.where(row_sum == 0.0, 1.0, row_sum)[..., None]
    return out.swapaxes(1, 2).reshape(q.shape).astype(q.dtype)


def _dot(spec, a, b):
    # Products of 16-bit inputs are exact in float32; those of float32 must not fall to TF32 or bfloat16 passes.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)
