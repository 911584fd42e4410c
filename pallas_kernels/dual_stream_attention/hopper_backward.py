"""Backward passes on Hopper: Pallas Mosaic GPU.

`query_gradient` runs over the key blocks of 128 query rows of one stream, `key_gradients` over all query tiles, of all
streams and of all heads of a group, that see 128 keys; probabilities are recomputed from the log-sum-exp
(arXiv:2307.08691, algorithm 2). Each gradient is summed in float32 by one warpgroup in a fixed order and written
once: the result is deterministic, and no second copy of a gradient exists.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dual_stream_attention.hopper_pipeline import (
    COLUMN,
    LOG2_E,
    ROW,
    TILE,
    TRANSFORMS,
    Accumulator,
    across,
    down,
    drain,
    fill_stage,
    load,
    mask_keys,
    zeros,
)
from pallas_kernels.dual_stream_attention.hopper_tiles import WARPGROUP_ROWS as ROWS
from pallas_kernels.dual_stream_attention.hopper_tiles import RowTiles

_WARPGROUPS = 2


class StreamResiduals(NamedTuple):
    """What the forward pass leaves of a stream, and its output's gradient.

    q, out, d_out: [B, P, N, H]; lse: [B, N, P] log-sum-exp to base 2.
    """

    q: jax.Array
    out: jax.Array
    lse: jax.Array
    d_out: jax.Array
    tiles: RowTiles


def query_gradient(
    stream: StreamResiduals, k: jax.Array, v: jax.Array, *, scale: float, block: int, stages: int
) -> tuple[jax.Array, jax.Array]:
    """Gradient [B, P, N, H] of one stream's queries, and delta [B, N, P]: row sums of output times its gradient."""
    num_rows, num_heads, head_size = stream.q.shape[1:]
    tiles = stream.tiles
    num_tiles = num_rows // (_WARPGROUPS * ROWS)
    tile_of = functools.partial(plgpu.SMEM, dtype=k.dtype, transforms=TRANSFORMS)
    kernel = functools.partial(
        _query_kernel, group=num_heads // k.shape[2], scale=scale, block=block, stages=stages, num_tiles=num_tiles
    )
    return plgpu.kernel(
        kernel,
        out_type=(stream.q, stream.lse),
        grid=(num_heads, num_tiles, k.shape[0]),
        grid_names=("head", "tile", "batch"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=(
            (tile_of((_WARPGROUPS, ROWS, head_size)),) * 3,
            plgpu.SMEM((_WARPGROUPS, ROWS), jnp.float32),
            (tile_of((stages, block, head_size)),) * 2,
            plgpu.Barrier(num_arrivals=3, num_barriers=_WARPGROUPS),
            (plgpu.Barrier(num_barriers=stages),) * 2,
            (plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),) * 2,
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
    )(
        stream.q, stream.out, stream.d_out, stream.lse, k, v,
        tiles.start, tiles.end, tiles.whole, tiles.keys_of_block,
    )  # fmt: skip


def _query_kernel(
    q_ref, out_ref, d_out_ref, lse_ref, k_ref, v_ref, start_ref, end_ref, whole_ref, keys_ref, dq_ref, delta_ref,
    row_smem, delta_smem, kv_smem, row_ready, kv_ready, kv_free,
    *, group, scale, block, stages, num_tiles,
):  # fmt: skip
    warpgroup, batch, head = (lax.axis_index(name) for name in ("warpgroup", "batch", "head"))
    tile = num_tiles - 1 - lax.axis_index("tile")
    range_batch = batch if start_ref.shape[0] > 1 else 0
    first_block = keys_ref[range_batch, tile, 0] // block
    num_blocks = pl.cdiv(keys_ref[range_batch, tile, 1], jnp.int32(block)) - first_block
    k_smem, v_smem = kv_smem

    @pl.when(warpgroup < _WARPGROUPS)
    def _consume():
        plgpu.set_max_registers(240, action="increase")
        row_tile = tile * _WARPGROUPS + warpgroup
        rows = pl.ds(row_tile * ROWS, ROWS)
        q_tile, out_tile, d_out_tile = (x.at[warpgroup] for x in row_smem)
        for ref, smem in ((q_ref, q_tile), (out_ref, out_tile), (d_out_ref, d_out_tile)):
            plgpu.copy_gmem_to_smem(ref.at[batch, rows, head], smem, row_ready.at[warpgroup])
        start = load(start_ref.at[range_batch, rows], ROW, optimized=False)
        end = load(end_ref.at[range_batch, rows], ROW, optimized=False)
        lse = load(lse_ref.at[batch, head, rows], ROW, optimized=False)
        whole_first, whole_last = whole_ref[range_batch, row_tile, 0], whole_ref[range_batch, row_tile, 1]
        plgpu.barrier_wait(row_ready.at[warpgroup])
        delta = row_sums(out_tile, d_out_tile)

        def key_block(step, dq):
            slot = lax.rem(step, jnp.int32(stages))
            first_key = (first_block + step) * block
            is_whole = (first_key >= whole_first) & (first_key + block <= whole_last)
            plgpu.barrier_wait(kv_ready[0].at[slot])
            plgpu.barrier_wait(kv_ready[1].at[slot])
            mask = functools.partial(mask_keys, start=start, end=end, first_key=first_key)
            d_scores = score_gradient(
                q_tile, d_out_tile, k_smem.at[slot], v_smem.at[slot], lse, delta, is_whole, mask, scale
            )
            plgpu.barrier_arrive(kv_free[1].at[slot])

            def weighted_keys(dq_ref):
                plgpu.wgmma(dq_ref, d_scores, k_smem.at[slot])

            dq = pl.run_state(weighted_keys)(Accumulator.init(dq))
            plgpu.barrier_arrive(kv_free[0].at[slot])
            return dq

        dq = lax.fori_loop(0, num_blocks, key_block, zeros(q_tile.shape, TILE))
        out_tile[...] = (dq * scale).astype(q_tile.dtype)
        delta_smem.at[warpgroup][...] = delta
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile, dq_ref.at[batch, rows, head])
        plgpu.copy_smem_to_gmem(delta_smem.at[warpgroup], delta_ref.at[batch, head, rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == _WARPGROUPS)
    def _fetch():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, jnp.int32(group))

        @pl.loop(0, num_blocks)
        def _key_block(step):
            keys = (batch, pl.ds((first_block + step) * block, block), kv_head)
            sources = ((k_ref.at[keys],), (v_ref.at[keys],))
            buffers = ((k_smem,), (v_smem,))
            fill_stage(step, stages, zip(sources, buffers, kv_ready, kv_free, strict=True))

        drain(num_blocks, stages, kv_free)


def row_sums(out_tile, d_out_tile) -> jax.Array:
    """Row sums of output times its gradient, float32, from shared memory."""
    out, d_out = (load(x, TILE).astype(jnp.float32) for x in (out_tile, d_out_tile))
    return (out * d_out).sum(axis=1)


def score_gradient(q_tile, d_out_tile, k_tile, v_tile, lse, delta, is_whole, mask, scale) -> jax.Array:
    """Gradient of the unscaled scores [rows, keys] in the type of the inputs; mask(scores) unless is_whole."""

    def probabilities(scores_ref, d_weights_ref):
        plgpu.wgmma(scores_ref, q_tile, k_tile.transpose((1, 0)))
        plgpu.wgmma(d_weights_ref, d_out_tile, v_tile.transpose((1, 0)))
        s = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
        s = lax.cond(is_whole, lambda s: s, mask, s)
        weights = jnp.exp2(s * (scale * LOG2_E) - down(lse, s.shape))
        return weights * (d_weights_ref[...] - down(delta, s.shape))

    accumulator = Accumulator((q_tile.shape[0], k_tile.shape[0]), jnp.float32)
    return pl.run_scoped(probabilities, accumulator, accumulator).astype(q_tile.dtype)


def key_gradients(
    streams: tuple[StreamResiduals, ...],
    deltas: tuple[jax.Array, ...],
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    stages: int,
) -> tuple[jax.Array, jax.Array]:
    """Gradients [B, T, K, H] of keys and values, summed over all streams and heads of a group."""
    batch, num_keys, num_kv_heads, head_size = k.shape
    tile_of = functools.partial(plgpu.SMEM, dtype=k.dtype, transforms=TRANSFORMS)
    arrays = tuple(
        (s.q, s.lse, s.d_out, delta, s.tiles.start, s.tiles.end, s.tiles.seen, s.tiles.whole, s.tiles.tiles_of_keys)
        for s, delta in zip(streams, deltas, strict=True)
    )
    return plgpu.kernel(
        functools.partial(_key_kernel, group=streams[0].q.shape[2] // num_kv_heads, scale=scale, stages=stages),
        out_type=(k, v),
        grid=(num_kv_heads, num_keys // (_WARPGROUPS * ROWS), batch),
        grid_names=("head", "tile", "batch"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=(
            (tile_of((_WARPGROUPS, ROWS, head_size)),) * 2,
            plgpu.Barrier(num_arrivals=2 * _WARPGROUPS),
            ((tile_of((stages, ROWS, head_size)), plgpu.SMEM((stages, ROWS), jnp.float32)),) * 2,
            (plgpu.Barrier(num_arrivals=2, num_barriers=stages),) * 2,
            (plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),) * 2,
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(arrays, k, v)


def _key_kernel(
    streams, k_ref, v_ref, dk_ref, dv_ref,
    kv_smem, kv_ready, row_smem, row_ready, row_free,
    *, group, scale, stages,
):  # fmt: skip
    warpgroup, batch, kv_head = (lax.axis_index(name) for name in ("warpgroup", "batch", "head"))
    tile = lax.axis_index("tile")
    (q_smem, lse_smem), (d_out_smem, delta_smem) = row_smem

    def for_row_tiles(body, carry):
        """carry = body(stream, its index of the sequence, head, row tile, running number, carry) over all of them."""
        number = jnp.int32(0)
        for stream in streams:
            tile_range_ref = stream[8]
            range_batch = batch if tile_range_ref.shape[0] > 1 else 0
            first, last = tile_range_ref[range_batch, tile, 0], tile_range_ref[range_batch, tile, 1]

            def of_head(head, carry, stream=stream, first=first, last=last, number=number, range_batch=range_batch):
                def of_tile(step, carry):
                    at = number + head * (last - first) + step
                    return body(stream, range_batch, kv_head * group + head, first + step, at, carry)

                return lax.fori_loop(0, last - first, of_tile, carry)

            carry = lax.fori_loop(0, group, of_head, carry) if group > 1 else of_head(jnp.int32(0), carry)
            number += group * (last - first)
        return carry

    @pl.when(warpgroup < _WARPGROUPS)
    def _consume():
        plgpu.set_max_registers(240, action="increase")
        first_key = (tile * _WARPGROUPS + warpgroup) * ROWS
        keys = pl.ds(first_key, ROWS)
        k_tile, v_tile = (x.at[warpgroup] for x in kv_smem)
        plgpu.copy_gmem_to_smem(k_ref.at[batch, keys, kv_head], k_tile, kv_ready)
        plgpu.copy_gmem_to_smem(v_ref.at[batch, keys, kv_head], v_tile, kv_ready)
        plgpu.barrier_wait(kv_ready)

        def row_tile(stream, range_batch, head, index, number, carry):
            del head
            start_ref, end_ref, seen_ref, whole_ref = stream[4:8]
            slot = lax.rem(number, jnp.int32(stages))
            rows = pl.ds(index * ROWS, ROWS)
            is_whole = first_key >= whole_ref[range_batch, index, 0]
            is_whole &= first_key + ROWS <= whole_ref[range_batch, index, 1]
            is_seen = first_key + ROWS > seen_ref[range_batch, index, 0]
            is_seen &= first_key < seen_ref[range_batch, index, 1]
            q_tile, d_out_tile = q_smem.at[slot], d_out_smem.at[slot]
            plgpu.barrier_wait(row_ready[0].at[slot])
            plgpu.barrier_wait(row_ready[1].at[slot])

            def mask(s):
                start = load(start_ref.at[range_batch, rows], COLUMN, optimized=False)
                end = load(end_ref.at[range_batch, rows], COLUMN, optimized=False)
                return mask_keys(s, start, end, first_key, keys_axis=0)

            def accumulate(refs):
                dk_ref, dv_ref = refs

                def transposed(scores_ref, d_weights_ref):
                    plgpu.wgmma(scores_ref, k_tile, q_tile.transpose((1, 0)))
                    plgpu.wgmma(d_weights_ref, v_tile, d_out_tile.transpose((1, 0)))
                    lse = load(lse_smem.at[slot], COLUMN)
                    s = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
                    s = lax.cond(is_whole, lambda s: s, mask, s)
                    weights = jnp.exp2(s * (scale * LOG2_E) - across(lse, s.shape))
                    plgpu.wgmma(dv_ref, weights.astype(k_tile.dtype), d_out_tile)
                    d_weights = plgpu.wgmma_accumulator_load(d_weights_ref, wait_n=1)
                    # So late because registers are short: a value for each row, beside four tiles.
                    delta = load(delta_smem.at[slot], COLUMN)
                    d_scores = (weights * (d_weights - across(delta, s.shape))).astype(k_tile.dtype)
                    # The copies that refill the stage must come after the reads of its row statistics.
                    plgpu.commit_smem()
                    plgpu.wgmma(dk_ref, d_scores, q_tile)

                pl.run_scoped(transposed, *[Accumulator((ROWS, ROWS), jnp.float32)] * 2)

            def add(carry):
                return tuple(pl.run_state(accumulate)(tuple(Accumulator.init(x) for x in carry)))

            carry = lax.cond(is_seen, add, lambda carry: carry, carry)
            plgpu.barrier_arrive(row_free[0].at[slot])
            plgpu.barrier_arrive(row_free[1].at[slot])
            return carry

        dk, dv = for_row_tiles(row_tile, (zeros(k_tile.shape, TILE), zeros(k_tile.shape, TILE)))
        k_tile[...] = (dk * scale).astype(k_tile.dtype)
        v_tile[...] = dv.astype(v_tile.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_tile, dk_ref.at[batch, keys, kv_head])
        plgpu.copy_smem_to_gmem(v_tile, dv_ref.at[batch, keys, kv_head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == _WARPGROUPS)
    def _fetch():
        plgpu.set_max_registers(24, action="decrease")

        def row_tile(stream, range_batch, head, index, number, carry):
            del range_batch, carry
            q_ref, lse_ref, d_out_ref, delta_ref = stream[:4]
            rows = pl.ds(index * ROWS, ROWS)
            sources = (
                (q_ref.at[batch, rows, head], lse_ref.at[batch, head, rows]),
                (d_out_ref.at[batch, rows, head], delta_ref.at[batch, head, rows]),
            )
            fill_stage(number, stages, zip(sources, row_smem, row_ready, row_free, strict=True))
            return number + 1

        drain(for_row_tiles(row_tile, jnp.int32(0)), stages, row_free)
