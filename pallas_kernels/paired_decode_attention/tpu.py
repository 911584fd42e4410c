"""Decode attention as a Pallas kernel for Google TPUs.

The grid goes over sequences, key/value heads and blocks of keys; the last is in order, with an online softmax in
scratch memory. Blocks that no row sees are neither fetched nor computed: their steps name the nearest block that is.
All rows that share a key/value head, of both streams, are the rows of one product. Arrays as in `api.py`, R rows a
sequence, G = N / K.

The lanes of a register are 128. A cache of head size 64 lies in memory without gaps, but a kernel wants each of its
rows to fill the lanes: every call would copy the cache.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import target_device

_BLOCK_BYTES = 512 * 1024
"""Of keys, and of values: a step of the grid then takes longer than its overhead of about 0.35 us on any TPU."""

_SUBLANES = 16
_LANES = 128


def unsupported(q: jax.Array, k_cache: jax.Array) -> str | None:
    """Reason why the kernel cannot do the call on the device that is compiled for, or None."""
    device = target_device()
    head_size = q.shape[3]
    if device.platform != "tpu":
        return f"it needs a TPU, and the device is {device.device_kind}"
    if q.dtype == jnp.float16:
        return "it needs float32 or bfloat16 queries, and they are float16"
    if head_size not in (128, 256):
        return f"it needs a head size of 128 or 256, and it is {head_size}"
    return None


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
    batch, num_rows, num_heads, head_size = q.shape
    num_kv_heads, capacity = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    block = _block_size(k_cache)
    rows = q.reshape(batch, num_rows, num_kv_heads, group, head_size).swapaxes(1, 2)
    rows = rows.reshape(batch, num_kv_heads, num_rows * group, head_size)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % _SUBLANES), (0, 0)))

    def row_block(b, head, j, *_):
        return b, head, 0, 0

    def cache_block(b, head, j, lengths, *_):
        return b, head, block_to_fetch(j, lengths[b], windows, block), 0

    rows_spec = pl.BlockSpec((None, None, *rows.shape[2:]), row_block)
    cache_spec = pl.BlockSpec((None, None, block, head_size), cache_block)
    out = pl.pallas_call(
        partial(_attend_to_block, windows=windows, group=group, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, num_kv_heads, pl.cdiv(capacity, block)),
            in_specs=[rows_spec, cache_spec, cache_spec],
            out_specs=rows_spec,
            scratch_shapes=[
                pltpu.VMEM((rows.shape[2], _LANES), jnp.float32),
                pltpu.VMEM((rows.shape[2], _LANES), jnp.float32),
                pltpu.VMEM(rows.shape[2:], jnp.float32),
            ],
        ),
        # Inside a shard_map the output varies over the mesh axes over which the queries do.
        out_shape=jax.ShapeDtypeStruct(rows.shape, q.dtype, manual_axis_type=jax.typeof(rows).manual_axis_type),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="decode_attention",
    )(jnp.minimum(lengths, capacity), k_scale, v_scale, rows, k_cache, v_cache)
    out = out[:, :, : num_rows * group].reshape(batch, num_kv_heads, num_rows, group, head_size)
    return out.swapaxes(1, 2).reshape(q.shape)


def block_to_fetch(j, length, windows, block):
    """The block of keys that step j names: the nearest that any row sees. A block named again is not fetched again."""
    first, last = _seen_blocks(length, windows, block)
    return jnp.clip(j, first, jnp.maximum(first, last))


def _block_size(k_cache):
    capacity, head_size = k_cache.shape[2:]
    return min(capacity, _BLOCK_BYTES // (head_size * k_cache.dtype.itemsize))


def _seen_blocks(length, windows, block):
    """First and last block of keys that any row of a sequence sees; the last is -1 for a sequence of length 0."""
    first = jnp.maximum(length - max(windows), 0) // block
    return first, (length + block - 1) // block - 1


def _attend_to_block(
    lengths, k_scale, v_scale, q_ref, k_ref, v_ref, out_ref, max_ref, sum_ref, acc_ref, *, windows, group, scale
):
    b, head, j = (pl.program_id(axis) for axis in range(3))
    block = k_ref.shape[0]
    length = lengths[b]
    first_block, last_block = _seen_blocks(length, windows, block)

    @pl.when(j == 0)
    def _():
        max_ref[...] = jnp.full_like(max_ref, -jnp.inf)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when((first_block <= j) & (j <= last_block))
    def _():
        q = q_ref[...]
        scores = _dot(q, k_ref[...].astype(q.dtype), contract=1) * (scale * k_scale[b, head])
        row = lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        key = lax.broadcasted_iota(jnp.int32, scores.shape, 1) + j * block
        window = jnp.full_like(row, windows[-1])
        for r in reversed(range(len(windows) - 1)):
            window = jnp.where(row < (r + 1) * group, windows[r], window)
        scores = jnp.where((length - window <= key) & (key < length), scores, -jnp.inf)
        row_max = max_ref[:, :1]
        new_max = jnp.maximum(row_max, scores.max(axis=1, keepdims=True))
        # A row that has seen no key yet keeps its maximum at -inf: exp must not meet -inf - (-inf).
        finite_max = jnp.where(new_max == -jnp.inf, 0.0, new_max)
        decay = jnp.exp(row_max - finite_max)
        weights = jnp.exp(scores - finite_max)
        v = v_ref[...]
        if jnp.issubdtype(v.dtype, jnp.floating):
            # A weight of zero does not silence a NaN: values that nobody wrote must not take part.
            written = lax.broadcasted_iota(jnp.int32, v.shape, 0) < length - j * block
            v = jnp.where(written, v.astype(jnp.float32), 0.0)
        v = v.astype(q.dtype)
        acc_ref[...] = acc_ref[...] * decay + _dot(weights.astype(q.dtype), v, contract=0)
        sum_ref[...] = jnp.broadcast_to(sum_ref[:, :1] * decay + weights.sum(axis=1, keepdims=True), sum_ref.shape)
        max_ref[...] = jnp.broadcast_to(new_max, max_ref.shape)

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        row_sum = sum_ref[:, :1]
        out = acc_ref[...] * v_scale[b, head] / jnp.where(row_sum == 0.0, 1.0, row_sum)
        out_ref[...] = out.astype(out_ref.dtype)


def _dot(a, b, contract):
    """Product of a over its columns and b over axis `contract`, float32 in full precision."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (contract,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
