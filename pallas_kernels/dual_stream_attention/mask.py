"""The one definition of which keys a query row sees, shared by every backend.

A stream's query row stands at row t of the sequence. With segments that are contiguous runs, causality and a
window that counts the row's own key, the keys it sees are one interval [start, end):

    start = max(first row of t's segment, t - window + 1)        end = t + 1

and the empty interval [0, 0) for a padding row (segment id 0, or t outside the sequence). A query block
therefore needs only the keys between the least start and the greatest end of its rows.

Eight rows of segments 1 1 1 1 1 2 2 0 with window 3 (rows are queries, columns keys):

    x . . . . . . .
    x x . . . . . .
    x x x . . . . .
    . x x x . . . .
    . . x x x . . .
    . . . . . x . .
    . . . . . x x .
    . . . . . . . .
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Stream(NamedTuple):
    """Query rows q [B, P, N, H] at rows out_index [B, P] (None: all T) that see `window` keys (None: all)."""

    q: jax.Array
    window: int | None
    out_index: jax.Array | None


class KeyRange(NamedTuple):
    """Visible keys [start, end) of each query row; int32 [B, P], or [1, P] where all sequences are alike."""

    start: jax.Array
    end: jax.Array


def key_ranges(
    num_keys: int,
    *,
    window: int | None,
    segment_ids: jax.Array | None = None,
    out_index: jax.Array | None = None,
) -> KeyRange:
    """Intervals of visible keys for query rows at `out_index`, or at every row of the sequence if None.

    Args:
        num_keys: length T of the sequence.
        window: number of keys a row sees at most, its own included; None for no limit.
        segment_ids: int [B, T], contiguous runs of equal ids, 0 for padding; None for one segment.
        out_index: int [B, P] rows of the sequence; a value outside [0, T), such as -1, sees nothing.
    """
    positions = jnp.arange(num_keys, dtype=jnp.int32)[None]
    row = positions if out_index is None else out_index.astype(jnp.int32)
    visible = (row >= 0) & (row < num_keys)
    start = jnp.zeros_like(row)
    if segment_ids is not None:
        first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        segment_start = jax.lax.cummax(jnp.where(first, positions, 0), axis=1)
        row, visible = (jnp.broadcast_to(x, (segment_ids.shape[0], x.shape[1])) for x in (row, visible))
        at_row = jnp.clip(row, 0, num_keys - 1)
        start = jnp.take_along_axis(segment_start, at_row, axis=1)
        visible &= jnp.take_along_axis(segment_ids, at_row, axis=1) != 0
    if window is not None:
        start = jnp.maximum(start, row - window + 1)
    return KeyRange(jnp.where(visible, start, 0), jnp.where(visible, row + 1, 0))
