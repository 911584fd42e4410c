"""Attention of both streams on Hopper GPUs by Pallas Mosaic GPU kernels.

Forward: one kernel a stream. Backward: one kernel a stream for the queries' gradient and one for the gradients of keys
and values, which sums over the streams. All sums are float32 and in a fixed order.
"""

import contextlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.dispatch import is_nvidia_gpu, target_device
from pallas_kernels.dual_stream_attention.hopper_tiles import BLOCK_ROWS, RowTiles, row_tiles
from pallas_kernels.dual_stream_attention.hopper_tuning import options
from pallas_kernels.dual_stream_attention.mask import KeyRange, Stream, key_ranges

_WIDEST_SWEEP = 129
"""Largest window whose keys fit the ring of the sweep kernels."""

_JAX = (0, 11)
"""Mosaic GPU's interface changes with each minor version."""


def unsupported(
    streams: tuple[Stream, ...], k: jax.Array, segment_ids: jax.Array | None, deterministic: bool
) -> str | None:
    """Reason why the Hopper kernels cannot do the call on the device that is compiled for, or None."""
    del streams, segment_ids, deterministic
    device = target_device()
    if not is_nvidia_gpu(device) or device.compute_capability != "9.0":
        return f"it needs a Hopper GPU, and the device is {device.device_kind}"
    if jax.__version_info__[:2] != _JAX:
        return f"it needs JAX {'.'.join(map(str, _JAX))}, and this is {jax.__version__}"
    if k.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, and the inputs are {k.dtype}"
    if k.shape[-1] not in (64, 128):
        return f"it needs a head size of 64 or 128, and it is {k.shape[-1]}"
    return None


def attention(
    streams: tuple[Stream, ...], k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, scale: float
) -> tuple[jax.Array, ...]:
    """Output [B, P, N, H] of each stream over k, v [B, T, K, H]."""
    tiles = tuple(_tiles(stream, k.shape[1], segment_ids) for stream in streams)
    sweeps = tuple(_sweep_window(stream) for stream in streams)
    outputs: Any = _attention(tuple(_pad(s.q) for s in streams), _pad(k), _pad(v), tiles, scale, sweeps)
    return tuple(out[:, : s.q.shape[1]] for out, s in zip(outputs, streams, strict=True))


def cache_attention(stream: Stream, k_cache: jax.Array, v_cache: jax.Array, scale: float) -> jax.Array:
    """Output [B, P, N, H] of one stream over caches [B, K, T, H], without gradients."""
    from pallas_kernels.dual_stream_attention.hopper_forward import forward

    def pad(cache):
        return jnp.pad(cache, ((0, 0), (0, 0), (0, -cache.shape[2] % BLOCK_ROWS), (0, 0)))

    tiles = _tiles(stream, k_cache.shape[2], None)
    sizes = options("forward", jax.eval_shape(lambda cache: cache.swapaxes(1, 2), k_cache))
    out, _ = forward(_pad(stream.q), pad(k_cache), pad(v_cache), tiles, scale=scale, is_cache=True, **sizes)
    return out[:, : stream.q.shape[1]]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(queries, k, v, tiles, scale, sweeps):
    return _attention_fwd(queries, k, v, tiles, scale, sweeps)[0]


def _attention_fwd(queries, k, v, tiles, scale, sweeps):
    from pallas_kernels.dual_stream_attention.hopper_forward import forward
    from pallas_kernels.dual_stream_attention.hopper_window import window_forward

    outputs, lses = [], []
    for q, stream_tiles, window in zip(queries, tiles, sweeps, strict=True):
        if window is None:
            out, lse = forward(q, k, v, stream_tiles, scale=scale, **options("forward", k))
        else:
            out, lse = window_forward(q, k, v, stream_tiles, window=window, scale=scale)
        outputs.append(checkpoint_name(out, "attention_output"))
        lses.append(checkpoint_name(lse, "attention_lse"))
    return tuple(outputs), (queries, k, v, tiles, tuple(outputs), tuple(lses))


def _attention_bwd(scale, sweeps, residuals, d_outputs):
    from pallas_kernels.dual_stream_attention.hopper_backward import StreamResiduals, key_gradients, query_gradient
    from pallas_kernels.dual_stream_attention.hopper_window import window_query_gradient

    queries, k, v, tiles, outputs, lses = residuals
    streams = tuple(StreamResiduals(*x) for x in zip(queries, outputs, lses, d_outputs, tiles, strict=True))
    d_queries, deltas = zip(
        *(
            query_gradient(stream, k, v, scale=scale, **options("query_gradient", k))
            if window is None
            else window_query_gradient(stream, k, v, window=window, scale=scale)
            for stream, window in zip(streams, sweeps, strict=True)
        ),
        strict=True,
    )
    dk, dv = key_gradients(streams, deltas, k, v, scale=scale, **options("key_gradients", k))
    return d_queries, dk, dv, None


_attention.defvjp(_attention_fwd, _attention_bwd)


def _sweep_window(stream: Stream) -> int | None:
    """The window of a stream that the sweep kernels serve, None for others."""
    is_narrow = stream.window is not None and stream.window <= _WIDEST_SWEEP
    return stream.window if is_narrow and stream.out_index is None else None


def _tiles(stream: Stream, num_keys: int, segment_ids: jax.Array | None) -> RowTiles:
    """Tiles of a stream's padded rows; where no argument tells of rows or segments, constants of the program."""
    constant = segment_ids is None and stream.out_index is None
    with jax.ensure_compile_time_eval() if constant else contextlib.nullcontext():
        ranges = key_ranges(num_keys, window=stream.window, segment_ids=segment_ids, out_index=stream.out_index)
        ranges = KeyRange(*(jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK_ROWS))) for x in ranges))
        return row_tiles(ranges, num_keys + -num_keys % BLOCK_ROWS)


def _pad(x: jax.Array) -> jax.Array:
    """Zero rows up to a multiple of a block's; nobody sees such keys, and such rows see nothing."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK_ROWS), (0, 0), (0, 0)))
