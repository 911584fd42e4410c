"""Pallas kernels for Google TPUs: windowed streams by halo, all others block-sparse, one pass for dk and dv.

A stream without `out_index` whose window is at most 513 goes to `tpu_window.py`, any other to `tpu_sparse.py`. Both
streams share `tpu_key_gradient.py`. The log-sum-exp of each row is kept; the backward pass recomputes the
probabilities from it.

Heads of fewer than 128 numbers fill up the 128 lanes of a register with nothing: a head size of 64 takes the memory
and, in products over it, the time of 128.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.dispatch import target_device
from pallas_kernels.dual_stream_attention import tpu_sparse, tpu_window
from pallas_kernels.dual_stream_attention.mask import KeyRange, Stream, key_ranges
from pallas_kernels.dual_stream_attention.tpu_key_gradient import Rows, StreamGradient, key_value_gradients
from pallas_kernels.dual_stream_attention.tpu_tiles import Visits, block_size, key_blocks, query_blocks


def unsupported(
    streams: tuple[Stream, ...], k: jax.Array, segment_ids: jax.Array | None, deterministic: bool
) -> str | None:
    """Reason why the kernels cannot do the call on the device that is compiled for, or None."""
    del streams, segment_ids, deterministic
    head_size = k.shape[-1]
    device = target_device()
    if device.platform != "tpu":
        return f"it needs a TPU, and the device is {device.device_kind}"
    if k.dtype == jnp.float16:
        return "it needs float32 or bfloat16, and the inputs are float16"
    if head_size % 8 or head_size > 256:
        return f"it needs a head size that is a multiple of 8 and at most 256, and it is {head_size}"
    return None


def attention(
    streams: tuple[Stream, ...], k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, scale: float
) -> tuple[jax.Array, ...]:
    """Output [B, P, N, H] of each stream over k, v [B, T, K, H]."""
    num_keys = k.shape[1]
    ranges = tuple(
        key_ranges(num_keys, window=s.window, segment_ids=segment_ids, out_index=s.out_index) for s in streams
    )
    halos = tuple(tpu_window.halo_of(s.window, num_keys) if s.out_index is None else None for s in streams)
    return _attention(tuple(s.q for s in streams), k, v, ranges, halos, scale)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(queries, k, v, ranges, halos, scale):
    return _attention_fwd(queries, k, v, ranges, halos, scale)[0]


def _attention_fwd(queries, k, v, ranges, halos, scale):
    keys, values = _head_major(k), _head_major(v)
    outputs, lses = [], []
    for q, key_range, halo in zip(queries, ranges, halos, strict=True):
        start, end = _range_rows(key_range, q)
        if halo is None:
            forward = partial(tpu_sparse.forward, visits=_visits(start, end, keys))
        else:
            forward = partial(tpu_window.forward, halo=halo)
        out, lse = forward(_head_major(q), keys, values, start, end, scale=scale)
        outputs.append(checkpoint_name(_row_major(out, q), "attention_output"))
        lses.append(checkpoint_name(lse, "attention_lse"))
    return tuple(outputs), (queries, k, v, ranges, tuple(outputs), tuple(lses))


def _attention_bwd(halos, scale, residuals, d_outputs):
    queries, k, v, ranges, outputs, lses = residuals
    keys, values = _head_major(k), _head_major(v)
    d_queries, streams = [], []
    for q, key_range, halo, out, lse, d_out in zip(queries, ranges, halos, outputs, lses, d_outputs, strict=True):
        delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1, keepdims=True)
        delta = _head_major(delta).swapaxes(2, 3)
        start, end = _range_rows(key_range, q)
        rows = Rows(start, end, _head_major(q), _head_major(d_out), lse, delta)
        if halo is None:
            visits = _visits(start, end, keys)
            dq = tpu_sparse.query_gradient(rows, keys, values, visits, scale=scale)
            streams.append(StreamGradient(rows, None, query_blocks(visits, keys.shape[2] // block_size(keys.shape[2]))))
        else:
            dq = tpu_window.query_gradient(rows, keys, values, halo=halo, scale=scale)
            streams.append(StreamGradient(rows, halo, None))
        d_queries.append(_row_major(dq, q))
    dk, dv = key_value_gradients(keys, values, tuple(streams), scale=scale)
    return tuple(d_queries), _row_major(dk, k), _row_major(dv, v), None


_attention.defvjp(_attention_fwd, _attention_bwd)


def _visits(start, end, keys) -> Visits:
    return key_blocks(start[:, 0, 0], end[:, 0, 0], block_size(start.shape[3]), block_size(keys.shape[2]))


def _head_major(x):
    """[B, rows, heads, H] to [B, heads, rows, H], with rows of zero up to a multiple of the block."""
    length = x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, -length % block_size(length)), (0, 0), (0, 0)))
    return x.swapaxes(1, 2)


def _row_major(x, like):
    return x.swapaxes(1, 2)[:, : like.shape[1]]


def _range_rows(key_range: KeyRange, q):
    """start and end as [B, 1, 1, rows]; the rows that fill the last block see nothing."""
    batch, length = q.shape[:2]
    for x in key_range:
        x = jnp.pad(x, ((0, 0), (0, -length % block_size(length))))
        yield jnp.broadcast_to(x, (batch, x.shape[1]))[:, None, None]
