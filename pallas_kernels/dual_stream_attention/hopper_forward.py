"""Forward pass of one stream on Hopper: Pallas Mosaic GPU.

One block of the grid computes two tiles of 128 query rows of a head. Its first two warpgroups own 64 rows each and run
an online softmax over key blocks (arXiv:2307.08691, algorithm 1); the third fetches keys and values by TMA into a ring
of stages. The two take turns, so that the products of one run under the exponentials of the other (arXiv:2407.08608,
section 3.1). Scores are kept in units of log 2.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dual_stream_attention.hopper_pipeline import (
    BLIND_LSE,
    LOG2_E,
    LOWEST,
    ROW,
    TILE,
    TRANSFORMS,
    Accumulator,
    down,
    drain,
    fill_stage,
    for_tile_pair,
    load,
    mask_keys,
    zeros,
)
from pallas_kernels.dual_stream_attention.hopper_tiles import WARPGROUP_ROWS as ROWS
from pallas_kernels.dual_stream_attention.hopper_tiles import RowTiles

_WARPGROUPS = 2


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiles: RowTiles,
    *,
    scale: float,
    block: int,
    stages: int,
    is_cache: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Output [B, P, N, H] and log-sum-exp to base 2 [B, N, P] of one stream.

    P and T are multiples of 128; q [B, P, N, H], k and v [B, T, K, H], or [B, K, T, H] where `is_cache`, are bfloat16
    or float16.
    """
    batch, num_rows, num_heads, head_size = q.shape
    num_kv_heads = k.shape[1 if is_cache else 2]
    num_tiles = num_rows // (_WARPGROUPS * ROWS)

    def tile_of(shape, dtype=q.dtype):
        return plgpu.SMEM(shape, dtype, transforms=TRANSFORMS)

    kernel = functools.partial(
        _kernel,
        group=num_heads // num_kv_heads,
        scale=scale,
        block=block,
        stages=stages,
        num_tiles=num_tiles,
        is_cache=is_cache,
    )
    return plgpu.kernel(
        kernel,
        out_type=(q, jax.ShapeDtypeStruct((batch, num_heads, num_rows), jnp.float32)),
        grid=(num_heads, pl.cdiv(num_tiles, 2), batch),
        grid_names=("head", "pair", "batch"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=(
            (tile_of((_WARPGROUPS, ROWS, head_size)),) * 2,
            (tile_of((stages, block, head_size)),) * 2,
            plgpu.SMEM((_WARPGROUPS, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=_WARPGROUPS),
            (plgpu.Barrier(num_barriers=stages),) * 2,
            (plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),) * 2,
            plgpu.Barrier(num_arrivals=_WARPGROUPS),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, tiles.start, tiles.end, tiles.whole, tiles.keys_of_block)


def _kernel(
    q_ref, k_ref, v_ref, start_ref, end_ref, whole_ref, keys_ref, o_ref, lse_ref,
    row_smem, kv_smem, lse_smem, q_ready, kv_ready, kv_free, turn,
    *, group, scale, block, stages, num_tiles, is_cache,
):  # fmt: skip
    warpgroup, batch, head, pair = (lax.axis_index(name) for name in ("warpgroup", "batch", "head", "pair"))
    range_batch = batch if start_ref.shape[0] > 1 else 0
    (k_smem, v_smem), (k_ready, v_ready), (k_free, v_free) = kv_smem, kv_ready, kv_free

    def key_blocks(tile):
        first = keys_ref[range_batch, tile, 0] // block
        return first, pl.cdiv(keys_ref[range_batch, tile, 1], jnp.int32(block)) - first

    def take_turn():
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    @pl.when(warpgroup < _WARPGROUPS)
    def _consume():
        plgpu.set_max_registers(240, action="increase")
        q_tile, o_tile = (x.at[warpgroup] for x in row_smem)
        lse_tile = lse_smem.at[warpgroup]

        def fetch_queries(tile):
            rows = pl.ds((tile * _WARPGROUPS + warpgroup) * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(q_ref.at[batch, rows, head], q_tile, q_ready.at[warpgroup])

        fetch_queries(num_tiles - 1 - pair)
        pl.when(warpgroup == 1)(take_turn)

        def of_tile(tile, next_tile, has_next, number):
            first_block, num_blocks = key_blocks(tile)
            row_tile = tile * _WARPGROUPS + warpgroup
            rows = pl.ds(row_tile * ROWS, ROWS)
            start = load(start_ref.at[range_batch, rows], ROW, optimized=False)
            end = load(end_ref.at[range_batch, rows], ROW, optimized=False)
            whole_first, whole_last = whole_ref[range_batch, row_tile, 0], whole_ref[range_batch, row_tile, 1]
            plgpu.barrier_wait(q_ready.at[warpgroup])

            def key_block(step, carry):
                acc, row_max, row_sum = carry
                slot = lax.rem(number + step, jnp.int32(stages))
                first_key = (first_block + step) * block
                plgpu.barrier_wait(k_ready.at[slot])

                def scores(scores_ref):
                    plgpu.wgmma(scores_ref, q_tile, k_smem.at[slot].transpose((1, 0)))
                    take_turn()
                    return scores_ref[...]

                s = pl.run_scoped(scores, Accumulator((ROWS, block), jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                is_whole = (first_key >= whole_first) & (first_key + block <= whole_last)
                s = lax.cond(is_whole, lambda s: s, lambda s: mask_keys(s, start, end, first_key), s)
                new_max = jnp.maximum(row_max, s.max(axis=1) * (scale * LOG2_E))
                decay = jnp.exp2(row_max - new_max)
                weights = jnp.exp2(s * (scale * LOG2_E) - down(new_max, s.shape))
                row_sum = row_sum * decay + weights.sum(axis=1)
                acc = acc * down(decay, acc.shape)
                weights = weights.astype(q_tile.dtype)
                acc, row_sum, new_max, weights = lax.optimization_barrier((acc, row_sum, new_max, weights))
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(v_ready.at[slot])
                plgpu.barrier_wait(turn)

                def weighted_values(acc_ref):
                    plgpu.wgmma(acc_ref, weights, v_smem.at[slot])

                acc = pl.run_state(weighted_values)(Accumulator.init(acc))
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, new_max, row_sum

            lowest = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW)
            init = (zeros(q_tile.shape, TILE), lowest, zeros((ROWS,), ROW))
            acc, row_max, row_sum = lax.fori_loop(0, num_blocks, key_block, init)
            pl.when(has_next)(lambda: fetch_queries(next_tile))

            blind = row_sum == 0.0
            row_sum = jnp.where(blind, 1.0, row_sum)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            o_tile[...] = (acc * down(1.0 / row_sum, acc.shape)).astype(o_tile.dtype)
            lse_tile[...] = jnp.where(blind, BLIND_LSE, row_max + jnp.log(row_sum) * LOG2_E)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_tile, o_ref.at[batch, rows, head])
            plgpu.copy_smem_to_gmem(lse_tile, lse_ref.at[batch, head, rows])
            return number + num_blocks

        for_tile_pair(pair, num_tiles, of_tile, jnp.int32(0))
        pl.when(warpgroup == 0)(take_turn)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == _WARPGROUPS)
    def _fetch():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, jnp.int32(group))

        def of_tile(tile, next_tile, has_next, number):
            del next_tile, has_next
            first_block, num_blocks = key_blocks(tile)

            @pl.loop(0, num_blocks)
            def _key_block(step):
                keys = pl.ds((first_block + step) * block, block)
                keys = (batch, kv_head, keys) if is_cache else (batch, keys, kv_head)
                sources = ((k_ref.at[keys],), (v_ref.at[keys],))
                buffers = ((k_smem,), (v_smem,))
                fill_stage(number + step, stages, zip(sources, buffers, kv_ready, kv_free, strict=True))

            return number + num_blocks

        drain(for_tile_pair(pair, num_tiles, of_tile, jnp.int32(0)), stages, kv_free)
