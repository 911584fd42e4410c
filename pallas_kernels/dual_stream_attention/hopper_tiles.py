"""Which tiles of rows and keys the Hopper kernels visit, from the key intervals of the rows.

A warpgroup owns `WARPGROUP_ROWS` query rows, or keys in the pass for dk and dv. All arrays here are int32 with a
leading axis of B, or of 1 where all sequences are alike.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dual_stream_attention.mask import KeyRange

WARPGROUP_ROWS = 64
_FAR = 2**30


class RowTiles(NamedTuple):
    """Key intervals of the rows of one stream, row by row and tile by tile.

    start, end: [B, P] visible keys of each row.
    seen: [B, P / 64, 2] keys [first, last) that any row of the tile sees.
    whole: [B, P / 64, 2] keys [first, last) that every row of the tile sees: blocks inside need no mask.
    """

    start: jax.Array
    end: jax.Array
    seen: jax.Array
    whole: jax.Array


def row_tiles(key_range: KeyRange) -> RowTiles:
    """Tiles of 64 rows; the number of rows is a multiple of 64. A tile that sees nothing has seen = (far away, 0)."""
    start, end = (x.reshape(x.shape[0], -1, WARPGROUP_ROWS) for x in key_range)
    visible = end > start
    seen = jnp.stack([jnp.where(visible, start, _FAR).min(-1), jnp.where(visible, end, 0).max(-1)], axis=-1)
    whole = jnp.stack([start.max(-1), end.min(-1)], axis=-1)
    return RowTiles(*key_range, seen, whole)


def key_blocks(tiles: RowTiles, tiles_per_group: int, block: int) -> jax.Array:
    """Blocks [first, last) of `block` keys that a group of neighbouring row tiles sees: [B, groups, 2]."""
    seen = tiles.seen.reshape(tiles.seen.shape[0], -1, tiles_per_group, 2)
    first, last = seen[..., 0].min(-1) // block, -(-seen[..., 1].max(-1) // block)
    return jnp.stack([jnp.minimum(first, last), last], axis=-1)


def row_tile_range(tiles: RowTiles, num_keys: int, block: int) -> jax.Array:
    """Row tiles [first, last) between which lie all that see a key of each block of keys: [B, T / block, 2].

    Rows in any order are allowed, so a tile in between may see none of the keys.
    """
    edges = jnp.arange(0, num_keys, block, dtype=jnp.int32)[:, None]
    first, last = tiles.seen[:, None, :, 0], tiles.seen[:, None, :, 1]
    sees = (first < edges + block) & (last > edges)
    index = jnp.arange(sees.shape[-1], dtype=jnp.int32)
    lowest = jnp.where(sees, index, sees.shape[-1]).min(-1)
    above = jnp.where(sees, index + 1, 0).max(-1)
    return jnp.stack([jnp.minimum(lowest, above), above], axis=-1)
