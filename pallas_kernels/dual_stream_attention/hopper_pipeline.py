"""What the Hopper kernels share: register and memory layouts, masking, and the ring of stages that TMA fills."""

import functools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2_E = math.log2(math.e)

LOWEST = -1e30
"""The row maximum before any key: a row that sees nothing then has weights of zero, without a special case."""

BLIND_LSE = 1e30
"""Log-sum-exp of a row that sees nothing: every probability recomputed from it is zero."""

TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)
"""Registers of a matrix product's result, of one value for each of its rows, and of one for each column."""

TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
"""How 16-bit operands of matrix products lie in shared memory."""


Accumulator = plgpu.WGMMAAccumulatorRef
"""Registers that matrix products add to while they are under way."""


def load(ref, layout, *, optimized: bool = True) -> jax.Array:
    """Loads from shared or, with optimized=False, from global memory into registers."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]  (JAX 0.10 differs)


def down(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value for each row, repeated along the row."""
    return lax.broadcast_in_dim(x, shape, [0])


def across(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value for each column, repeated down the column."""
    return lax.broadcast_in_dim(x, shape, [1])


def zeros(shape: tuple[int, ...], layout) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def fill_stage(number: jax.Array, stages: int, copies: Iterable[tuple]) -> None:
    """Starts copies number `number` of the ring: (sources, their buffers, ready, free), all of a step's operands.

    Buffers are refilled once their last readers have arrived at `free`; each copy is an arrival at `ready`.
    """
    slot = lax.rem(number, jnp.int32(stages))
    for sources, buffers, ready, free in copies:
        pl.when(number >= stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
        for source, buffer in zip(sources, buffers, strict=True):
            plgpu.copy_gmem_to_smem(source, buffer.at[slot], ready.at[slot])


def drain(total: jax.Array, stages: int, frees: Iterable) -> None:
    """Waits for the readers of the last copies, so that no arrival is left when the kernel ends."""
    for i in range(stages):
        number = total - stages + i
        slot = lax.rem(number + stages, jnp.int32(stages))
        for free in frees:
            pl.when(number >= 0)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))


def mask_keys(
    scores: jax.Array, start: jax.Array, end: jax.Array, first_key: jax.Array, *, keys_axis: int = 1
) -> jax.Array:
    """Scores of 64 rows and the keys from first_key on, -inf at the keys outside [start, end) of their row."""
    of_rows = functools.partial(down if keys_axis == 1 else across, shape=scores.shape)
    key = first_key + plgpu.broadcasted_iota(jnp.int32, scores.shape, keys_axis, layout=TILE)
    return jnp.where((of_rows(start) <= key) & (key < of_rows(end)), scores, -jnp.inf)


def for_tile_pair(pair: jax.Array, num_tiles: int, body: Callable, carry):
    """carry = body(tile, tile after it, whether there is one, carry) over the two tiles of a block of the grid.

    Tile num_tiles - 1 - pair comes first, tile `pair` second: the work of a causal stream grows with the tile, so
    that each pair has as much as any other, and what the second fetches and the first stores runs under the other's
    products. The middle one of an odd number of tiles is alone.
    """
    first, second = num_tiles - 1 - pair, pair
    count = jnp.where(first == second, 1, 2)

    def step(i, carry):
        return body(jnp.where(i == 0, first, second), second, i + 1 < count, carry)

    return lax.fori_loop(0, count, step, carry)
