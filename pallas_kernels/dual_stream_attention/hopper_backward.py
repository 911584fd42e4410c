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

_FLOAT_TRANSFORMS = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
"""How float32 tiles that TMA adds to global memory lie in shared memory."""


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
    sum_queries: tuple[bool, ...],
    *,
    scale: float,
    stages: int,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """Gradients of keys and values, and of the queries of some streams, from one pass over the pairs of tiles.

    Args:
        sum_queries: for which streams the gradient of the queries is summed as well (H = 128 alone).
        stages: row tiles in flight.

    Returns:
        The gradients of these queries over `scale`, float32 [B, P, N, H], summed in no fixed order; dk and dv
        [B, T, K, H], summed over all streams and heads of a group in a fixed order.
    """
    batch, num_keys, num_kv_heads, head_size = k.shape
    tile_of = functools.partial(plgpu.SMEM, dtype=k.dtype, transforms=TRANSFORMS)
    arrays = tuple(
        (s.q, s.lse, s.d_out, delta, s.tiles.start, s.tiles.end, s.tiles.seen, s.tiles.whole, s.tiles.tiles_of_keys)
        for s, delta in zip(streams, deltas, strict=True)
    )
    kernel = functools.partial(
        _key_kernel,
        group=streams[0].q.shape[2] // num_kv_heads,
        scale=scale,
        stages=stages,
        sum_queries=sum_queries,
    )
    query_scratch = (
        tile_of((2, _WARPGROUPS, ROWS, ROWS)),
        plgpu.SMEM((_WARPGROUPS, ROWS, head_size // _WARPGROUPS), jnp.float32, transforms=_FLOAT_TRANSFORMS),
        plgpu.Barrier(num_arrivals=_WARPGROUPS),
    )
    call = plgpu.kernel(
        kernel,
        out_type=(),
        grid=(num_kv_heads, num_keys // (_WARPGROUPS * ROWS), batch),
        grid_names=("head", "tile", "batch"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=(
            (tile_of((_WARPGROUPS, ROWS, head_size)),) * 2,
            plgpu.Barrier(num_arrivals=_WARPGROUPS * 2, num_barriers=1),
            ((tile_of((stages, ROWS, head_size)), plgpu.SMEM((stages, ROWS), jnp.float32)),) * 2,
            (plgpu.Barrier(num_arrivals=2, num_barriers=stages),) * 2,
            (plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),) * 2,
            *(query_scratch if any(sum_queries) else ()),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )

    def run(refs):
        call(arrays, k, v, *refs)

    sums = tuple(jnp.zeros(s.q.shape, jnp.float32) for s, summed in zip(streams, sum_queries, strict=True) if summed)
    sums, dk, dv = pl.run_state(run)((sums, lax.empty(k.shape, k.dtype), lax.empty(v.shape, v.dtype)))
    return sums, dk, dv


def _key_kernel(
    streams, k_ref, v_ref, query_sum_refs, dk_ref, dv_ref,
    kv_smem, kv_ready, row_smem, row_ready, row_free, *query_scratch,
    group, scale, stages, sum_queries,
):  # fmt: skip
    warpgroup, batch, kv_head = (lax.axis_index(name) for name in ("warpgroup", "batch", "head"))
    tile = lax.axis_index("tile")
    (q_smem, lse_smem), (d_out_smem, delta_smem) = row_smem
    remaining = iter(query_sum_refs)
    query_sum_refs = [next(remaining) if summed else None for summed in sum_queries]

    def for_row_tiles(body, carry, around=lambda loop, query_sum_ref, first, number, count, carry: loop(carry)):
        """carry = body(stream, its sum, index of the sequence, head, row tile, running number, carry) over them all.

        around(loop, sum, first row tile, first number, count, carry) is what is done for a stream.
        """
        number = jnp.int32(0)
        for stream, query_sum_ref in zip(streams, query_sum_refs, strict=True):
            tile_range_ref = stream[8]
            range_batch = batch if tile_range_ref.shape[0] > 1 else 0
            first, last = tile_range_ref[range_batch, tile, 0], tile_range_ref[range_batch, tile, 1]
            of_stream = functools.partial(body, stream, query_sum_ref, range_batch)

            def of_head(head, carry, of_stream=of_stream, first=first, last=last, number=number):
                def of_tile(step, carry):
                    at = number + head * (last - first) + step
                    return of_stream(kv_head * group + head, first + step, at, carry)

                return lax.fori_loop(0, last - first, of_tile, carry)

            def loop(carry, of_head=of_head):
                return lax.fori_loop(0, group, of_head, carry) if group > 1 else of_head(jnp.int32(0), carry)

            count = group * (last - first)
            carry = around(loop, query_sum_ref, first, number, count, carry)
            number += count
        return carry

    @pl.when(warpgroup < _WARPGROUPS)
    def _consume():
        plgpu.set_max_registers(240, action="increase")
        first_key = (tile * _WARPGROUPS + warpgroup) * ROWS
        keys = pl.ds(first_key, ROWS)
        k_tile, v_tile = (x.at[warpgroup] for x in kv_smem)
        plgpu.copy_gmem_to_smem(k_ref.at[batch, keys, kv_head], k_tile, kv_ready.at[0])
        plgpu.copy_gmem_to_smem(v_ref.at[batch, keys, kv_head], v_tile, kv_ready.at[0])
        plgpu.barrier_wait(kv_ready.at[0])

        def row_tile(stream, query_sum_ref, range_batch, head, index, number, carry):
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

            def release():
                plgpu.barrier_arrive(row_free[0].at[slot])
                plgpu.barrier_arrive(row_free[1].at[slot])

            def accumulate(refs, before=None):
                dk_ref, dv_ref = refs

                def scores_and_part(scores_ref):
                    def part(part_ref):
                        weighted_keys(part_ref, number - 1)
                        plgpu.wgmma(scores_ref, k_tile, q_tile.transpose((1, 0)))
                        store_part(plgpu.wgmma_accumulator_load(part_ref, wait_n=1))

                    if before is None:
                        plgpu.wgmma(scores_ref, k_tile, q_tile.transpose((1, 0)))
                    else:
                        pl.run_scoped(part, Accumulator((ROWS, part_columns), jnp.float32))
                    pl.run_scoped(functools.partial(transposed, scores_ref), Accumulator((ROWS, ROWS), jnp.float32))

                def transposed(scores_ref, d_weights_ref):
                    plgpu.wgmma(d_weights_ref, v_tile, d_out_tile.transpose((1, 0)))
                    lse = load(lse_smem.at[slot], COLUMN)
                    s = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
                    s = lax.cond(is_whole, lambda s: s, mask, s)
                    weights = jnp.exp2(s * (scale * LOG2_E) - across(lse, s.shape))
                    plgpu.wgmma(dv_ref, weights.astype(k_tile.dtype), d_out_tile)
                    d_weights = plgpu.wgmma_accumulator_load(d_weights_ref, wait_n=1)
                    # So late because registers are short: two values a row, beside four tiles.
                    delta = load(delta_smem.at[slot], COLUMN)
                    d_scores = (weights * (d_weights - across(delta, s.shape))).astype(k_tile.dtype)
                    if before is not None:
                        store_score_gradient(d_scores, number)
                    # The copies that refill the stage must come after the reads of its row statistics.
                    plgpu.commit_smem()
                    if before is not None:
                        plgpu.barrier_arrive(query_scratch[2])
                        add_part(query_sum_ref, *before)
                    plgpu.wgmma(dk_ref, d_scores, q_tile)

                pl.run_scoped(scores_and_part, Accumulator((ROWS, ROWS), jnp.float32))

            def add(carry, before=None):
                run = pl.run_state(functools.partial(accumulate, before=before))
                return tuple(run(tuple(Accumulator.init(x) for x in carry)))

            if query_sum_ref is None:
                carry = lax.cond(is_seen, add, lambda carry: carry, carry)
            else:
                # Also where none of its own keys is seen: the other warpgroup counts on its score gradients.
                dk, dv, *before = carry
                carry = (*add((dk, dv), before), head, index)
            release()
            return carry

        # The queries' gradient of a row tile is the product of its score gradients, from both warpgroups, and the keys.
        # It is made one step later, when they lie in shared memory; each warpgroup makes half of its columns.
        part_columns = k_tile.shape[1] // _WARPGROUPS
        columns = pl.ds(pl.multiple_of(warpgroup * part_columns, part_columns), part_columns)

        def store_score_gradient(d_scores, number):
            # It stays while the other warpgroup is in the next step.
            query_scratch[0].at[lax.rem(number, jnp.int32(2)), warpgroup][...] = d_scores

        def weighted_keys(part_ref, number):
            plgpu.barrier_wait(query_scratch[2])
            for other in range(_WARPGROUPS):
                d_scores = query_scratch[0].at[lax.rem(number + 2, jnp.int32(2)), other]
                plgpu.wgmma(part_ref, d_scores.transpose((1, 0)), kv_smem[0].at[other, :, columns])

        def store_part(part):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            query_scratch[1].at[warpgroup][...] = part

        def add_part(query_sum_ref, head, index):
            target = query_sum_ref.at[batch, pl.ds(index * ROWS, ROWS), head, columns]
            plgpu.copy_smem_to_gmem(query_scratch[1].at[warpgroup], target, reduction_op="add")

        def with_query_sum(loop, query_sum_ref, first, number, count, carry):
            if query_sum_ref is None:
                return loop(carry)
            # Score gradients of zero stand for the step before the first.
            store_score_gradient(zeros((ROWS, ROWS), TILE).astype(k_tile.dtype), number + 1)
            plgpu.commit_smem()
            plgpu.barrier_arrive(query_scratch[2])
            dk, dv, *before = loop((*carry, kv_head * group, first))

            def last_part(part_ref):
                weighted_keys(part_ref, number + count - 1)
                return part_ref[...]

            store_part(pl.run_scoped(last_part, Accumulator((ROWS, part_columns), jnp.float32)))
            plgpu.commit_smem()
            add_part(query_sum_ref, *before)
            # Until both are here, the other warpgroup may read the keys and the score gradients.
            plgpu.barrier_arrive(query_scratch[2])
            plgpu.barrier_wait(query_scratch[2])
            return dk, dv

        init = (zeros(k_tile.shape, TILE), zeros(k_tile.shape, TILE))
        dk, dv = for_row_tiles(row_tile, init, with_query_sum)
        k_tile[...] = (dk * scale).astype(k_tile.dtype)
        v_tile[...] = dv.astype(v_tile.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_tile, dk_ref.at[batch, keys, kv_head])
        plgpu.copy_smem_to_gmem(v_tile, dv_ref.at[batch, keys, kv_head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == _WARPGROUPS)
    def _fetch():
        plgpu.set_max_registers(24, action="decrease")

        def row_tile(stream, query_sum_ref, range_batch, head, index, number, carry):
            del query_sum_ref, range_batch, carry
            q_ref, lse_ref, d_out_ref, delta_ref = stream[:4]
            rows = pl.ds(index * ROWS, ROWS)
            sources = (
                (q_ref.at[batch, rows, head], lse_ref.at[batch, head, rows]),
                (d_out_ref.at[batch, rows, head], delta_ref.at[batch, head, rows]),
            )
            fill_stage(number, stages, zip(sources, row_smem, row_ready, row_free, strict=True))
            return number + 1

        drain(for_row_tiles(row_tile, jnp.int32(0)), stages, row_free)
