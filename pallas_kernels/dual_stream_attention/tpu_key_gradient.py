"""TPU kernel of the gradients of keys and values: one pass over the key blocks for all streams of a call.

A block of keys meets, for each query head of its group, the rows of every stream that see it, and sums both
gradients in float32 on the chip: they are rounded and written once. A windowed stream brings the rows of the block
and a halo of rows after them in the first step, by tiles of 128 keys as in `tpu_window.py`; any other stream
brings one visited query block (`tpu_tiles.Visits`) a step.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dual_stream_attention.tpu_tiles import (
    TILE,
    Rows,
    Visits,
    block_size,
    dot,
    masked_scores,
    matrix_spec,
    num_steps,
    output,
    schedule,
    score_gradient,
    vector_spec,
)

_ROW_AXES = Rows(1, 1, 0, 0, 1, 1)
"""Where rows are counted in a block of each."""


class StreamGradient(NamedTuple):
    """A stream's rows, and its halo if it is windowed, else the query blocks that each key block visits."""

    rows: Rows
    halo: int | None
    visits: Visits | None


def key_value_gradients(k, v, streams: tuple[StreamGradient, ...], *, scale: float) -> tuple[jax.Array, jax.Array]:
    """Gradients of k and v [B, K, T, H], summed over the streams and the heads of a group."""
    batch, num_kv_heads, length, head_size = k.shape
    block = block_size(length)
    group = streams[0].rows.q.shape[1] // num_kv_heads
    steps = num_steps(*(s.visits for s in streams if s.visits is not None))
    schedules = tuple(None if s.visits is None else schedule(s.visits, steps) for s in streams)
    keys = matrix_spec(block, head_size, lambda b, kv_head, i, *_: (b, kv_head, i))
    return pl.pallas_call(
        partial(_kernel, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, num_kv_heads, length // block, group, steps),
            in_specs=[keys, keys, tuple(_specs(number, stream, group, block) for number, stream in enumerate(streams))],
            out_specs=[keys, keys],
            scratch_shapes=[pltpu.VMEM((block, head_size), jnp.float32)] * 2,
        ),
        out_shape=[output(k.shape, k.dtype, k), output(v.shape, v.dtype, v)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3 + ("arbitrary",) * 2),
        name="attention_key_value_gradients",
    )(schedules, k, v, tuple(s.rows if s.halo is None else (s.rows, s.rows) for s in streams))


def _specs(number, stream, group, key_block):
    """Specs of the blocks of rows of a stream: the visited one, or the key block's own rows and the halo after them."""

    def specs(rows, block_at):
        def of_rows(b, _kv_head, *ids):
            return b, 0, block_at(b, *ids)

        def of_head(b, kv_head, i, head_of_group, *ids):
            return b, kv_head * group + head_of_group, block_at(b, i, head_of_group, *ids)

        range_spec, matrix = vector_spec(rows, of_rows), matrix_spec(rows, stream.rows.q.shape[3], of_head)
        vector = vector_spec(rows, of_head)
        return Rows(range_spec, range_spec, matrix, matrix, vector, vector)

    num_rows = stream.rows.q.shape[2]
    if stream.halo is None:
        return specs(block_size(num_rows), lambda b, i, _head, step, schedules: schedules[number].visited(b, i, step))
    halos = key_block // stream.halo
    # The last block has no rows after it: it reads its own last ones, which the kernel makes blind.
    return (
        specs(key_block, lambda b, i, *_: i),
        specs(stream.halo, lambda b, i, *_: jnp.minimum((i + 1) * halos, num_rows // stream.halo - 1)),
    )


def _kernel(schedules, k_ref, v_ref, streams, dk_ref, dv_ref, dk_acc, dv_acc, *, scale):
    batch, key_block, head, step = (pl.program_id(axis) for axis in (0, 2, 3, 4))
    first_key = key_block * k_ref.shape[0]

    @pl.when((head == 0) & (step == 0))
    def _():
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    def add(keys: slice, rows: Rows):
        k, v = k_ref[keys], v_ref[keys]
        scores = masked_scores(rows.q, k, rows.start, rows.end, first_key + (keys.start or 0), scale)
        weights, d_scores = score_gradient(scores, v, rows.d_out, rows.lse, rows.delta)
        dk_acc[keys] += dot(d_scores, rows.q, 1, 0)
        dv_acc[keys] += dot(weights, rows.d_out, 1, 0)

    def visit(rows):
        add(slice(None), Rows(*(ref[...] for ref in rows)))

    def window(own, after):
        after = Rows(*(ref[...] for ref in after))
        is_last = key_block == pl.num_programs(2) - 1
        after = after._replace(end=jnp.where(is_last, 0, after.end))
        rows = [jnp.concatenate([x[...], y], axis) for x, y, axis in zip(own, after, _ROW_AXES, strict=True)]
        for key in range(0, k_ref.shape[0], TILE):
            tile = [
                lax.slice_in_dim(x, key, key + TILE + after.q.shape[0], axis=axis)
                for x, axis in zip(rows, _ROW_AXES, strict=True)
            ]
            add(slice(key, key + TILE), Rows(*tile))

    for refs, of_stream in zip(streams, schedules, strict=True):
        if of_stream is None:
            pl.when(step == 0)(partial(window, *refs))
        else:
            pl.when(of_stream.is_visit(batch, key_block, step))(partial(visit, refs))

    @pl.when((head == pl.num_programs(3) - 1) & (step == pl.num_programs(4) - 1))
    def _():
        dk_ref[...] = (dk_acc[...] * scale).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc[...].astype(dv_ref.dtype)
