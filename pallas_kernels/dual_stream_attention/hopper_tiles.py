"""Which tiles of rows and keys the Hopper kernels visit, from the key intervals of the rows.

A warpgroup owns `WARPGROUP_ROWS` query rows, or keys in the pass for dk and dv. All arrays here are int32 with a
leading axis of B, or of 1 where all sequences are alike.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dual_stream_attention.mask import KeyRange

WARPGROUP_ROWS = 64
BLOCK_ROWS = 2 * WARPGROUP_ROWS
"""Rows, or keys, of a block of the grid: two warpgroups share what it fetches."""

_FAR = 2**30


class RowTiles(NamedTuple):
    """Key intervals of the P rows of one stream, and what follows from them for tiles of rows and keys.

    start, end: [B, P] visible keys of each row.
    seen: [B, P / 64, 2] keys [first, last) that any row of a tile sees; (far away, 0) if none does.
    whole: [B, P / 64, 2] keys [first, last) that every row of a tile sees: scores inside need no mask.
    keys_of_block: [B, P / 128, 2] keys [first, last) that any row of a block sees, (0, 0) if none does.
    tiles_of_keys: [B, T / 128, 2] row tiles [first, last) between which lie all that see one of 128 keys. Rows may come
        in any order, so a tile in between may see none of the keys.
    """

    start: jax.Array
    end: jax.Array
    seen: jax.Array
    whole: jax.Array
    keys_of_block: jax.Array
    tiles_of_keys: jax.Array


def row_tiles(key_range: KeyRange, num_keys: int) -> RowTiles:
    """Tiles of the rows of `key_range`; their number and that of the keys T are multiples of 128."""
    start, end = (x.reshape(x.shape[0], -1, WARPGROUP_ROWS) for x in key_range)
    visible = end > start
    first, last = jnp.where(visible, start, _FAR).min(-1), jnp.where(visible, end, 0).max(-1)

    of_block = [x.reshape(x.shape[0], -1, BLOCK_ROWS // WARPGROUP_ROWS) for x in (first, last)]
    block_last = of_block[1].max(-1)
    block_first = jnp.minimum(of_block[0].min(-1), block_last)

    keys = jnp.arange(0, num_keys, BLOCK_ROWS, dtype=jnp.int32)[:, None]
    sees = (first[:, None] < keys + BLOCK_ROWS) & (last[:, None] > keys)
    tile = jnp.arange(first.shape[1], dtype=jnp.int32)
    tile_last = jnp.where(sees, tile + 1, 0).max(-1)
    tile_first = jnp.minimum(jnp.where(sees, tile, _FAR).min(-1), tile_last)

    def pairs(*ends):
        return jnp.stack(ends, axis=-1)

    whole = pairs(start.max(-1), end.min(-1))
    return RowTiles(*key_range, pairs(first, last), whole, pairs(block_first, block_last), pairs(tile_first, tile_last))
