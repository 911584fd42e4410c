"""The windowed stream on Hopper, as a sweep along the sequence: Pallas Mosaic GPU.

A window of W keys makes a tile of 64 rows see its own 64 keys and `halo` blocks of 64 before it. A block of the grid
takes `chunk` neighbouring row tiles of a head, its two consumer warpgroups every other one, and keeps the key blocks in
a ring while they are in sight: queries, keys, values and outputs cross the memory bus once, but for the halo of each
chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dual_stream_attention.hopper_backward import StreamResiduals, row_sums, score_gradient
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
    load,
    mask_keys,
    zeros,
)
from pallas_kernels.dual_stream_attention.hopper_tiles import WARPGROUP_ROWS as ROWS
from pallas_kernels.dual_stream_attention.hopper_tiles import RowTiles

_WARPGROUPS = 2
_MULTIPROCESSORS = 132
MAX_HALO = 2


def halo_blocks(window: int) -> int:
    """Blocks of 64 keys before its own that a tile of 64 rows sees."""
    return -(-(window - 1) // ROWS)


def chunk_of(batch: int, num_rows: int, num_heads: int) -> int:
    """Row tiles of a block of the grid: long, to share the halo, but enough blocks for two waves on the chip."""
    num_tiles = num_rows // ROWS
    chunk = 2
    while num_tiles % (2 * chunk) == 0 and batch * num_heads * num_tiles // (2 * chunk) >= 2 * _MULTIPROCESSORS - 8:
        chunk *= 2
    return chunk


def window_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiles: RowTiles,
    *,
    window: int,
    scale: float,
    chunk: int | None = None,
    stages: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, N, H] and log-sum-exp to base 2 [B, N, T] of rows that are the rows of the sequence."""
    batch, num_rows, num_heads, head_size = q.shape
    halo = halo_blocks(window)
    chunk = chunk or chunk_of(batch, num_rows, num_heads)
    stages = stages or halo + 3
    tile_of = functools.partial(plgpu.SMEM, dtype=q.dtype, transforms=TRANSFORMS)
    kernel = functools.partial(
        _forward_kernel, group=num_heads // k.shape[2], scale=scale, chunk=chunk, halo=halo, stages=stages
    )
    return plgpu.kernel(
        kernel,
        out_type=(q, jax.ShapeDtypeStruct((batch, num_heads, num_rows), jnp.float32)),
        grid=(num_heads, num_rows // (chunk * ROWS), batch),
        grid_names=("head", "chunk", "batch"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=(
            tile_of((_WARPGROUPS, ROWS, head_size)),
            tile_of((_WARPGROUPS, ROWS, head_size)),
            plgpu.SMEM((_WARPGROUPS, ROWS), jnp.float32),
            tile_of((stages, ROWS, head_size)),
            tile_of((stages, ROWS, head_size)),
            plgpu.Barrier(num_barriers=_WARPGROUPS),
            plgpu.Barrier(num_barriers=_WARPGROUPS),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=halo + 1, num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(q, k, v, tiles.start, tiles.end, tiles.whole)


def _forward_kernel(
    q_ref, k_ref, v_ref, start_ref, end_ref, whole_ref, o_ref, lse_ref,
    q_smem, o_smem, lse_smem, k_smem, v_smem, q_ready, q_free, kv_ready, kv_free,
    *, group, scale, chunk, halo, stages,
):  # fmt: skip
    warpgroup, batch, head = (lax.axis_index(name) for name in ("warpgroup", "batch", "head"))
    first_tile = lax.axis_index("chunk") * chunk
    range_batch = batch if start_ref.shape[0] > 1 else 0

    @pl.when(warpgroup < _WARPGROUPS)
    def _consume():
        plgpu.set_max_registers(240, action="increase")
        q_tile, o_tile, lse_tile = q_smem.at[warpgroup], o_smem.at[warpgroup], lse_smem.at[warpgroup]

        _wait_for_first_blocks(kv_ready, warpgroup, halo)

        @pl.loop(0, chunk // _WARPGROUPS)
        def _tile(i):
            at = i * _WARPGROUPS + warpgroup
            rows, is_whole, mask = _row_tile(first_tile + at, range_batch, start_ref, end_ref, whole_ref)
            slots = [lax.rem(at + j, jnp.int32(stages)) for j in range(halo + 1)]
            _wait_for_next_blocks(kv_ready, at + halo, stages)
            plgpu.barrier_wait(q_ready.at[warpgroup])

            def scores(*refs):
                for slot, ref in zip(slots, refs, strict=True):
                    plgpu.wgmma(ref, q_tile, k_smem.at[slot].transpose((1, 0)))
                return [ref[...] for ref in refs]

            s = pl.run_scoped(scores, *[Accumulator((ROWS, ROWS), jnp.float32)] * (halo + 1))
            plgpu.barrier_arrive(q_free.at[warpgroup])
            blocks = [first_tile + at - halo + j for j in range(halo + 1)]
            s = [
                lax.cond(is_whole(block), lambda s: s, functools.partial(mask, block=block), x)
                for x, block in zip(s, blocks, strict=True)
            ]
            row_max = functools.reduce(jnp.maximum, [x.max(axis=1) for x in s]) * (scale * LOG2_E)
            row_max = jnp.maximum(row_max, LOWEST)
            weights = [jnp.exp2(x * (scale * LOG2_E) - down(row_max, x.shape)) for x in s]
            row_sum = sum(x.sum(axis=1) for x in weights)
            weights = [x.astype(q_tile.dtype) for x in weights]

            def weighted_values(acc_ref):
                for slot, x in zip(slots, weights, strict=True):
                    plgpu.wgmma(acc_ref, x, v_smem.at[slot])
                return acc_ref[...]

            acc = pl.run_scoped(weighted_values, Accumulator(q_tile.shape, jnp.float32))
            _release(kv_free, at, slots, chunk)
            blind = row_sum == 0.0
            row_sum = jnp.where(blind, 1.0, row_sum)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            o_tile[...] = (acc * down(1.0 / row_sum, acc.shape)).astype(o_tile.dtype)
            lse_tile[...] = jnp.where(blind, BLIND_LSE, row_max + jnp.log(row_sum) * LOG2_E)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_tile, o_ref.at[batch, rows, head], commit_group=False)
            plgpu.copy_smem_to_gmem(lse_tile, lse_ref.at[batch, head, rows], commit_group=False)
            plgpu.commit_smem_to_gmem_group()

        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(kv_ready.at[(chunk + halo - 1) % stages]))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == _WARPGROUPS)
    def _fetch():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, jnp.int32(group))

        @pl.loop(0, chunk + halo)
        def _block(n):
            @pl.when(n >= halo)
            def _rows():
                at = n - halo
                rows = (batch, pl.ds((first_tile + at) * ROWS, ROWS), head)
                fill_stage(at, _WARPGROUPS, [((q_ref.at[rows],), (q_smem,), q_ready, q_free)])

            # Blocks before the sequence are in nobody's sight: any block stands in for them.
            keys = (batch, pl.ds(jnp.maximum(first_tile + n - halo, 0) * ROWS, ROWS), kv_head)
            fill_stage(n, stages, [((k_ref.at[keys], v_ref.at[keys]), (k_smem, v_smem), kv_ready, kv_free)])

        drain(jnp.int32(chunk + halo), stages, [kv_free])
        drain(jnp.int32(chunk), _WARPGROUPS, [q_free])


def window_query_gradient(
    stream: StreamResiduals,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int,
    scale: float,
    chunk: int | None = None,
    stages: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gradient [B, T, N, H] of the queries, and delta [B, N, T]: row sums of output times its gradient."""
    batch, num_rows, num_heads, head_size = stream.q.shape
    halo = halo_blocks(window)
    chunk = chunk or chunk_of(batch, num_rows, num_heads)
    stages = stages or halo + 2
    tile_of = functools.partial(plgpu.SMEM, dtype=k.dtype, transforms=TRANSFORMS)
    kernel = functools.partial(
        _query_kernel, group=num_heads // k.shape[2], scale=scale, chunk=chunk, halo=halo, stages=stages
    )
    return plgpu.kernel(
        kernel,
        out_type=(stream.q, stream.lse),
        grid=(num_heads, num_rows // (chunk * ROWS), batch),
        grid_names=("head", "chunk", "batch"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=(
            (tile_of((_WARPGROUPS, ROWS, head_size)),) * 3,
            plgpu.SMEM((_WARPGROUPS, ROWS), jnp.float32),
            (tile_of((stages, ROWS, head_size)),) * 2,
            plgpu.Barrier(num_arrivals=3, num_barriers=_WARPGROUPS),
            plgpu.Barrier(num_barriers=_WARPGROUPS),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=halo + 1, num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(
        stream.q, stream.out, stream.d_out, stream.lse, k, v,
        stream.tiles.start, stream.tiles.end, stream.tiles.whole,
    )  # fmt: skip


def _query_kernel(
    q_ref, out_ref, d_out_ref, lse_ref, k_ref, v_ref, start_ref, end_ref, whole_ref, dq_ref, delta_ref,
    row_smem, delta_smem, kv_smem, row_ready, row_free, kv_ready, kv_free,
    *, group, scale, chunk, halo, stages,
):  # fmt: skip
    warpgroup, batch, head = (lax.axis_index(name) for name in ("warpgroup", "batch", "head"))
    first_tile = lax.axis_index("chunk") * chunk
    range_batch = batch if start_ref.shape[0] > 1 else 0
    k_smem, v_smem = kv_smem

    @pl.when(warpgroup < _WARPGROUPS)
    def _consume():
        plgpu.set_max_registers(240, action="increase")
        q_tile, out_tile, d_out_tile = (x.at[warpgroup] for x in row_smem)
        delta_tile = delta_smem.at[warpgroup]
        _wait_for_first_blocks(kv_ready, warpgroup, halo)

        @pl.loop(0, chunk // _WARPGROUPS)
        def _tile(i):
            at = i * _WARPGROUPS + warpgroup
            rows, is_whole, mask = _row_tile(first_tile + at, range_batch, start_ref, end_ref, whole_ref)
            lse = load(lse_ref.at[batch, head, rows], ROW, optimized=False)
            slots = [lax.rem(at + j, jnp.int32(stages)) for j in range(halo + 1)]
            plgpu.barrier_wait(row_ready.at[warpgroup])
            delta = row_sums(out_tile, d_out_tile)
            _wait_for_next_blocks(kv_ready, at + halo, stages)
            dq = zeros(q_tile.shape, TILE)
            for j, slot in enumerate(slots):
                block = first_tile + at - halo + j
                operands = (q_tile, d_out_tile, k_smem.at[slot], v_smem.at[slot])
                d_scores = score_gradient(
                    *operands, lse, delta, is_whole(block), functools.partial(mask, block=block), scale
                )

                def weighted_keys(dq_ref, slot=slot, d_scores=d_scores):
                    plgpu.wgmma(dq_ref, d_scores, k_smem.at[slot])

                dq = pl.run_state(weighted_keys)(Accumulator.init(dq))
            _release(kv_free, at, slots, chunk)
            out_tile[...] = (dq * scale).astype(out_tile.dtype)
            delta_tile[...] = delta
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_tile, dq_ref.at[batch, rows, head], commit_group=False)
            plgpu.copy_smem_to_gmem(delta_tile, delta_ref.at[batch, head, rows], commit_group=False)
            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(row_free.at[warpgroup])

        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(kv_ready.at[(chunk + halo - 1) % stages]))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == _WARPGROUPS)
    def _fetch():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, jnp.int32(group))

        @pl.loop(0, chunk + halo)
        def _block(n):
            @pl.when(n >= halo)
            def _rows():
                at = n - halo
                rows = (batch, pl.ds((first_tile + at) * ROWS, ROWS), head)
                sources = [ref.at[rows] for ref in (q_ref, out_ref, d_out_ref)]
                fill_stage(at, _WARPGROUPS, [(sources, row_smem, row_ready, row_free)])

            keys = (batch, pl.ds(jnp.maximum(first_tile + n - halo, 0) * ROWS, ROWS), kv_head)
            fill_stage(n, stages, [((k_ref.at[keys], v_ref.at[keys]), kv_smem, kv_ready, kv_free)])

        drain(jnp.int32(chunk + halo), stages, [kv_free])
        drain(jnp.int32(chunk), _WARPGROUPS, [row_free])


def _row_tile(tile, range_batch, start_ref, end_ref, whole_ref):
    """Rows of a tile; is_whole(block): all of them see the whole block of 64 keys; mask(scores, block) of a block."""
    rows = pl.ds(tile * ROWS, ROWS)
    start = load(start_ref.at[range_batch, rows], ROW, optimized=False)
    end = load(end_ref.at[range_batch, rows], ROW, optimized=False)
    whole_first, whole_last = whole_ref[range_batch, tile, 0], whole_ref[range_batch, tile, 1]

    def is_whole(block):
        return (block * ROWS >= whole_first) & ((block + 1) * ROWS <= whole_last)

    return rows, is_whole, lambda s, block: mask_keys(s, start, end, block * ROWS)


def _wait_for_first_blocks(ready, warpgroup, halo):
    """Waits for the key blocks before those that `_wait_for_next_blocks` of the first row tile waits for."""
    for n in range(halo - 1):
        plgpu.barrier_wait(ready.at[n])
    if halo > 0:
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_wait(ready.at[halo - 1]))


def _wait_for_next_blocks(ready, last, stages):
    """Waits for key block `last` of the chunk and the one before it.

    A warpgroup waits once for each block, also for one that only the other reads: a barrier's phases must be followed
    one by one.
    """
    for n in (last - 1, last):
        slot = lax.rem(n + stages, jnp.int32(stages))
        pl.when(n >= 0)(lambda slot=slot: plgpu.barrier_wait(ready.at[slot]))


def _release(free, at, slots, chunk):
    """Row tile `at` of the chunk has read its key blocks, oldest first.

    A block is free after as many arrivals as row tiles can see it. The first and the last tile of a chunk also arrive
    for those outside.
    """
    halo = len(slots) - 1
    for j, slot in enumerate(slots):
        plgpu.barrier_arrive(free.at[slot])
        for _ in range(halo - j):
            pl.when(at == 0)(lambda slot=slot: plgpu.barrier_arrive(free.at[slot]))
        for _ in range(j):
            pl.when(at == chunk - 1)(lambda slot=slot: plgpu.barrier_arrive(free.at[slot]))
