"""Public attention operations and the choice of their backend.

Letters: B batch, T rows of the sequence, P output rows, N query heads, K key/value heads (K divides N), H
head size.

The backend is chosen while tracing, for the first of `jax.devices()` or the device of
`pallas_kernels.dispatch.compiling_for`.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose_backend
from pallas_kernels.dual_stream_attention import cudnn, hopper, tpu, xla
from pallas_kernels.dual_stream_attention.mask import Stream

Impl = Literal["auto", "hopper", "tpu", "cudnn", "xla"]

_BACKENDS = {"hopper": hopper, "tpu": tpu, "cudnn": cudnn, "xla": xla}
"""In the order in which `auto` tries them."""

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def dual_stream_attention(
    q_ctx: jax.Array,
    q_out: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int,
    out_window: int | None = None,
    segment_ids: jax.Array | None = None,
    out_index: jax.Array | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
    deterministic: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the context and the output stream of a layer over the context stream's keys and values.

    Context row i sees the keys j with i - window < j <= i; output row p sees the keys j <= t_p =
    out_index[p]. Softmax and accumulation are float32; dk and dv are summed over both streams in float32
    and rounded once.

    Args:
        q_ctx: [B, T, N, H] queries of the context rows; float32, bfloat16 or float16 like k, v and q_out.
        q_out: [B, P, N, H] queries of the output rows.
        k: [B, T, K, H] keys.
        v: [B, T, K, H] values.
        window: number of keys that a context row sees, its own included.
        out_window: the same limit for output rows; None lets them see the whole past.
        segment_ids: int [B, T]; a row sees the keys of its own segment alone. Equal ids must be one
            contiguous run. Id 0 is padding: such keys are seen by no row, such rows see nothing.
        out_index: int [B, P], the row t_p of the sequence that output row p duplicates, its own key
            included; -1 marks a padding row, which sees nothing. None means P == T and t_p = p.
        scale: positive factor on the scores; H ** -0.5 if None.
        impl: backend; "auto" takes the first that supports the call and logs its choice.
        deterministic: the same call gives the same bits (cuDNN exempt: it has no such switch).

    Returns:
        o_ctx [B, T, N, H] and o_out [B, P, N, H] in the type of the queries. A row that sees nothing is
        exactly zero and passes no gradient.

    Raises:
        ValueError: shapes, types, window or scale do not fit together.
        NotImplementedError: a backend named by `impl` does not support the call.
    """
    context, output = Stream(q_ctx, window, None), Stream(q_out, out_window, out_index)
    o_ctx, o_out = _attend("dual_stream_attention", (context, output), k, v, segment_ids, scale, impl, deterministic)
    return o_ctx, o_out


def sliding_window_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
    deterministic: bool = True,
) -> jax.Array:
    """The context stream of `dual_stream_attention` alone: q [B, T, N, H] to [B, T, N, H]."""
    stream = Stream(q, window, None)
    return _attend("sliding_window_attention", (stream,), k, v, segment_ids, scale, impl, deterministic)[0]


def cross_attention(
    q_out: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    out_index: jax.Array | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
    deterministic: bool = True,
) -> jax.Array:
    """The output stream of `dual_stream_attention` alone: q_out [B, P, N, H] to [B, P, N, H].

    With out_index None this is the causal self-attention of a Transformer.
    """
    stream = Stream(q_out, window, out_index)
    return _attend("cross_attention", (stream,), k, v, segment_ids, scale, impl, deterministic)[0]


def cache_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    positions: jax.Array,
    *,
    scale: float | None = None,
    impl: Impl = "auto",
) -> jax.Array:
    """Rows of a chunk over a cache: q [B, P, N, H] to [B, P, N, H]; a row sees the slots up to its own.

    It is `cross_attention` for the layout of the decode operations' cache. Not differentiable.

    Args:
        q: queries, float32, bfloat16 or float16.
        k_cache: [B, K, S, H] keys, of the queries' type.
        v_cache: [B, K, S, H] values.
        positions: int [B, P], the slot of each row; -1 marks a padding row.
        scale, impl: as in `dual_stream_attention`.

    Raises:
        ValueError: shapes, types or scale do not fit together.
        NotImplementedError: a backend named by `impl` does not support the call.
    """
    stream = Stream(q, None, positions)
    k, v = (x.swapaxes(1, 2) for x in (k_cache, v_cache))
    _check_stream(stream, k, v)
    scale = float(k.shape[-1] ** -0.5 if scale is None else scale)
    backend = choose_backend("cache_attention", impl, _BACKENDS, lambda b: b.unsupported((stream,), k, None, True))
    if backend is hopper:
        return hopper.cache_attention(stream, k_cache, v_cache, scale)
    return backend.attention((stream,), k, v, None, scale)[0]


def _attend(op, streams, k, v, segment_ids, scale, impl, deterministic):
    for stream in streams:
        _check_stream(stream, k, v)
    if segment_ids is not None:
        _check_index("segment_ids", segment_ids, k.shape[:2])
    if scale is not None and scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    backend = choose_backend(op, impl, _BACKENDS, lambda b: b.unsupported(streams, k, segment_ids, deterministic))
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    return backend.attention(streams, k, v, segment_ids, scale)


def _check_stream(stream: Stream, k: jax.Array, v: jax.Array) -> None:
    q = stream.q
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"attention needs q [B, P, N, H] and k, v [B, T, K, H], got q {q.shape}, k {k.shape}, v {v.shape}"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"the {k.shape[2]} key/value heads must divide the {q.shape[2]} query heads")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        raise ValueError(f"q, k, v must all be float32, bfloat16 or float16, got {q.dtype}, {k.dtype}, {v.dtype}")
    if stream.window is not None and stream.window < 1:
        raise ValueError(f"a window counts the row's own key and must be at least 1, got {stream.window}")
    if stream.out_index is not None:
        _check_index("out_index", stream.out_index, q.shape[:2])
    elif q.shape[1] != k.shape[1]:
        raise ValueError(f"{q.shape[1]} query rows for {k.shape[1]} keys need out_index, the row of each")


def _check_index(name: str, index: jax.Array, shape: tuple[int, ...]) -> None:
    if index.shape != shape or not jnp.issubdtype(index.dtype, jnp.integer):
        raise ValueError(f"{name} must be an integer array of shape {shape}, got {index.dtype} {index.shape}")
