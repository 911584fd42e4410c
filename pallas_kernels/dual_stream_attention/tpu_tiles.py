"""What the TPU kernels share: blocks and their schedule, the mask and the products of a tile.

Arrays in the kernels are head-major: matrices [B, heads, rows, H], what belongs to a row (its key range, its
log-sum-exp) [B, heads, 1, rows]. Scores are transposed, [keys, rows]: a row's values then lie along the lanes as
they do in memory, and its sums over keys run over sublanes, which costs no shuffle.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

TILE = 128
"""Rows of a tile of a windowed stream, and the unit of every block."""

BLOCK = 512
"""Largest number of rows or keys that a grid step fetches."""


def block_size(length: int) -> int:
    """Rows of a block for a sequence of `length` rows, which is padded to a multiple of it."""
    return next((size for size in (TILE, 2 * TILE) if length <= size), BLOCK)


class Rows(NamedTuple):
    """What the kernel reads of a stream's rows: q, d_out [B, N, P, H], lse, delta [B, N, 1, P] in float32, and the
    visible keys start, end, int32 [B, 1, 1, P]; or the specs or the blocks of these."""

    start: Any
    end: Any
    q: Any
    d_out: Any
    lse: Any
    delta: Any


class Visits(NamedTuple):
    """The run [first, end) of blocks of the other side that each block of one side visits, int32 [B, blocks]."""

    first: jax.Array
    end: jax.Array


def num_steps(*visits: Visits) -> jax.Array | int:
    """Grid steps of the longest run; at least one, for the kernel to write its zeros."""
    return functools.reduce(lambda steps, run: jnp.maximum(steps, jnp.max(run.end - run.first)), visits, 1)


class Schedule(NamedTuple):
    """Visits as a kernel reads them, from arrays or from references to scalar memory.

    Block i visits block shift[b, i] + step where that is at least first[b, i]. A run that is shorter than the grid
    thus falls on the last steps; those before it point at its first block, which is fetched in good time and once.
    """

    first: Any
    shift: Any

    def visited(self, batch, block, step):
        """Block that the grid step fetches."""
        return jnp.maximum(self.first[batch, block], self.shift[batch, block] + step)

    def is_visit(self, batch, block, step):
        """Whether the grid step belongs to the run of the block."""
        return self.shift[batch, block] + step >= self.first[batch, block]


def schedule(visits: Visits, steps) -> Schedule:
    """Schedule of the visits in a grid of `steps` steps."""
    return Schedule(visits.first, visits.end - steps)


def key_blocks(start: jax.Array, end: jax.Array, query_block: int, key_block: int) -> Visits:
    """Key blocks that the rows of each query block see, from the visible keys start, end [B, rows] of each row."""
    start, end = (x.reshape(x.shape[0], -1, query_block) for x in (start, end))
    last_end = end.max(axis=-1)
    first = jnp.where(end > start, start, last_end[..., None]).min(axis=-1)
    return Visits(first // key_block, (last_end + key_block - 1) // key_block)


def query_blocks(visits: Visits, num_key_blocks: int) -> Visits:
    """For each key block the shortest run of query blocks that holds all those that visit it."""
    key_block = jnp.arange(num_key_blocks, dtype=jnp.int32)
    sees = (visits.first[..., None] <= key_block) & (key_block < visits.end[..., None])
    query_block = jnp.arange(sees.shape[1], dtype=jnp.int32)[:, None]
    end = jnp.where(sees, query_block + 1, 0).max(axis=1)
    return Visits(jnp.where(sees, query_block, end[:, None]).min(axis=1), end)


def matrix_spec(rows: int, head_size: int, index) -> pl.BlockSpec:
    """Block [rows, H] of [B, heads, rows, H] at index(*grid) = (batch, head, block)."""
    return pl.BlockSpec((None, None, rows, head_size), lambda *ids: (*index(*ids), 0))


def vector_spec(rows: int, index) -> pl.BlockSpec:
    """Block [1, rows] of [B, heads, 1, rows] at index(*grid) = (batch, head, block)."""

    def at(*ids):
        batch, head, block = index(*ids)
        return batch, head, 0, block

    return pl.BlockSpec((None, None, 1, rows), at)


def output(shape: tuple[int, ...], dtype, like: jax.Array) -> jax.ShapeDtypeStruct:
    """Type of a kernel's output; inside a shard_map it varies over the mesh axes over which `like` does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Product of two matrices over one axis of each, accumulated in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def masked_scores(q, k, start, end, first_key, scale) -> jax.Array:
    """Scores [keys, rows] in float32, -inf where the row does not see the key.

    q [rows, H], k [keys, H] from the key `first_key` on, and the rows' visible keys start, end [1, rows].
    """
    keys = first_key + lax.broadcasted_iota(jnp.int32, (k.shape[0], 1), 0)
    return jnp.where((start <= keys) & (keys < end), dot(k, q, 1, 1) * scale, -jnp.inf)


def score_gradient(scores, v, d_out, lse, delta) -> tuple[jax.Array, jax.Array]:
    """Probabilities and gradients of the scores [keys, rows], rounded to the operands' type for the products.

    v [keys, H], d_out [rows, H], lse and delta [1, rows]; delta is the row sum of output times its gradient.
    """
    weights = jnp.exp(scores - lse)
    d_scores = weights * (dot(v, d_out, 1, 1) - delta)
    return weights.astype(v.dtype), d_scores.astype(v.dtype)
