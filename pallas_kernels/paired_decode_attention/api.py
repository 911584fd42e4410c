"""Public decode operations and the choice of their backend.

Letters: B batch, S capacity of the cache in tokens, N query heads, K key/value heads (K divides N), H head size.

The cache is [B, K, S, H]: the keys of one sequence and head are one contiguous run. A program that streams them
reads whole rows of memory in order, and the heads of a cache split over devices stay contiguous. A step writes
only K short rows a sequence, so the write does not mind.

The backend is chosen while tracing, for the first of `jax.devices()` or the device of
`pallas_kernels.dispatch.compiling_for`. Under a mesh, call the operation
inside `jax.shard_map`, split over the batch, over the heads or over both.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose_backend
from pallas_kernels.paired_decode_attention import tpu, triton, xla

Impl = Literal["auto", "triton", "tpu", "xla"]

_BACKENDS = {"triton": triton, "tpu": tpu, "xla": xla}
"""In the order in which `auto` tries them."""

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_SCALED_DTYPES = (jnp.int8, jnp.float8_e4m3fn)


def paired_decode_attention(
    q_ctx: jax.Array,
    q_out: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    window: int,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Attention of a token's context row and of its output row over the cache, in one pass over it.

    The context row of sequence b sees the keys [max(0, lengths[b] - window), lengths[b]), the output row the keys
    [0, lengths[b]). Softmax and accumulation are float32. What the cache holds from lengths[b] on does not
    matter, not even if it is NaN. The same call gives the same bits. Not differentiable.

    Args:
        q_ctx: [B, N, H] queries of the context rows; float32, bfloat16 or float16.
        q_out: [B, N, H] queries of the output rows, of the same type.
        k_cache: [B, K, S, H] keys: of the queries' type, or int8 or float8_e4m3fn with `k_scale`.
        v_cache: [B, K, S, H] values, of the type of the keys.
        lengths: int32 [B], valid tokens of each sequence, the one just written included. A sequence of length 0
            has output zero. The callers check that none exceeds S: the result would be undefined.
        window: number of keys that a context row sees, its own included.
        k_scale: float32 [B, K], what a stored key of a sequence and head must be multiplied by to give the key;
            for 8-bit caches, which are dequantised on the fly, and for no others.
        v_scale: the same for values.
        scale: factor on the scores; H ** -0.5 if None.
        impl: backend; "auto" takes the first that supports the call and logs its choice.

    Returns:
        o_ctx and o_out, [B, N, H] in the type of the queries.

    Raises:
        ValueError: shapes, types or window do not fit together.
        NotImplementedError: a backend named by `impl` does not support the call.
    """
    if q_ctx.shape != q_out.shape or q_ctx.dtype != q_out.dtype:
        raise ValueError(
            f"q_ctx and q_out must be alike, got {q_ctx.dtype} {q_ctx.shape} and {q_out.dtype} {q_out.shape}"
        )
    rows = jnp.stack((q_ctx, q_out), axis=1)
    windows = (window, None)
    out = _attend("paired_decode_attention", rows, windows, k_cache, v_cache, lengths, k_scale, v_scale, scale, impl)
    return out[:, 0], out[:, 1]


def decode_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    window: int | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> jax.Array:
    """One row a sequence, q [B, N, H] to [B, N, H], for models of one stream; see `paired_decode_attention`.

    With window None the row sees the keys [0, lengths[b]). With a window the blocks of keys before it are skipped.
    """
    rows = q[:, None]
    out = _attend("decode_attention", rows, (window,), k_cache, v_cache, lengths, k_scale, v_scale, scale, impl)
    return out[:, 0]


def sharded_decode_attention(
    q: jax.Array,
    first: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    axis: str,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Rows [B, R, N, H] over a cache whose tokens are shared out over the devices of mesh axis `axis`.

    Call it inside `jax.shard_map`. Each device attends to its own slots and one merge of the softmax sums follows:
    the result is the same on every device of the axis. Runs in XLA operations on every platform.

    Args:
        q: the same on every device of the axis.
        first: int32 [B, R], the first of the device's slots that a row sees.
        k_cache, v_cache: [B, K, S, H], the device's slots; see `paired_decode_attention` for types and scales.
        lengths: int32 [B], filled slots of the device; a row sees the slots [first, length), if any.

    Raises:
        ValueError: shapes or types do not fit together.
    """
    _check(q, (None,) * q.shape[1], k_cache, v_cache, lengths, k_scale, v_scale)
    if first.shape != q.shape[:2] or first.dtype != jnp.int32:
        raise ValueError(f"first must be an int32 array of shape {q.shape[:2]}, got {first.dtype} {first.shape}")
    if k_scale is None or v_scale is None:
        k_scale = v_scale = jnp.ones(k_cache.shape[:2], jnp.float32)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    return xla.attention_over_devices(q, first, k_cache, v_cache, lengths, k_scale, v_scale, scale, axis)


def _attend(op, q, windows, k_cache, v_cache, lengths, k_scale, v_scale, scale, impl):
    """Rows q [B, R, N, H], of which row r sees windows[r] keys, to [B, R, N, H]."""
    _check(q, windows, k_cache, v_cache, lengths, k_scale, v_scale)
    backend = choose_backend(op, impl, _BACKENDS, lambda b: b.unsupported(q, k_cache))
    batch, num_kv_heads, capacity, head_size = k_cache.shape
    windows = tuple(capacity if window is None else min(window, capacity) for window in windows)
    if k_scale is None:
        k_scale = v_scale = jnp.ones((batch, num_kv_heads), jnp.float32)
    scale = head_size**-0.5 if scale is None else scale
    return backend.attention(q, windows, k_cache, v_cache, lengths, k_scale, v_scale, scale)


def _check(q, windows, k_cache, v_cache, lengths, k_scale, v_scale):
    fits = q.ndim == 4 and k_cache.ndim == 4 and k_cache.shape == v_cache.shape
    if not fits or (q.shape[0], q.shape[3]) != (k_cache.shape[0], k_cache.shape[3]):
        raise ValueError(
            "decoding needs q [B, N, H] and k_cache, v_cache [B, K, S, H], "
            f"got q {(*q.shape[:1], *q.shape[2:])}, k_cache {k_cache.shape}, v_cache {v_cache.shape}"
        )
    batch, num_kv_heads = k_cache.shape[:2]
    if q.shape[2] % num_kv_heads:
        raise ValueError(f"the {num_kv_heads} key/value heads must divide the {q.shape[2]} query heads")
    if q.dtype not in _DTYPES:
        raise ValueError(f"queries must be float32, bfloat16 or float16, got {q.dtype}")
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q.dtype, *_SCALED_DTYPES):
        raise ValueError(
            f"a cache for {q.dtype} queries must be {q.dtype}, int8 or float8_e4m3fn, "
            f"got {k_cache.dtype}, {v_cache.dtype}"
        )
    if lengths.shape != (batch,) or lengths.dtype != jnp.int32:
        raise ValueError(f"lengths must be an int32 array of shape {(batch,)}, got {lengths.dtype} {lengths.shape}")
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (x is not None) != (k_cache.dtype in _SCALED_DTYPES):
            raise ValueError(f"an int8 or float8_e4m3fn cache needs {name} and no other has one, got {k_cache.dtype}")
        if x is not None and (x.shape != (batch, num_kv_heads) or x.dtype != jnp.float32):
            shape = (batch, num_kv_heads)
            raise ValueError(f"{name} must be a float32 array of shape {shape}, got {x.dtype} {x.shape}")
    for window in windows:
        if window is not None and window < 1:
            raise ValueError(f"a window counts the row's own key and must be at least 1, got {window}")
