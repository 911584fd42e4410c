"""The two streams: which rows a model computes for a sequence, in each of the four phases.

A sequence x_1..x_T gives T context rows, which make the keys and values of every layer, and P output rows, each the
duplicate of a context row t_p at which a token must be predicted. This module is the only place that knows why a
sequence is doubled: it turns tokens and segment ids into rows, positions, labels and mask arguments. Everything below
it sees two stacks of rows and intervals of visible keys.

| phase                  | T_in   | T_out    | output rows                             | function       |
|------------------------|--------|----------|-----------------------------------------|----------------|
| pretraining            | 0      | T        | all, or a random part of them           | `pretraining`  |
| supervised fine-tuning | prompt | response | those that predict a response token     | `fine_tuning`  |
| prefill                | T - 1  | 1        | the last of each prompt                 | `prefill`      |
| decode                 | -      | 1 a step | the new token's duplicate               | `decode`       |

Letters: B batch, T context rows, P output rows. Segment ids: 0 is padding, equal ids form one contiguous run of a row.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.core import Tracer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layout:
    """Rows of one batch.

    Attributes:
      tokens: [B, T] int32, token of each context row.
      positions: [B, T] int32, rotary position of each context row; a duplicate has its original's.
      segment_ids: [B, T] int32, or None where every row belongs to one document.
      out_index: [B, P] int32, the context row t_p that output row p duplicates, non-decreasing, then -1 for padding
        rows; or None where P = T and t_p = p.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array | None
    out_index: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Targets:
    """What the output rows must predict: labels [B, P] int32 and weights [B, P] float32, 0 where nothing counts."""

    labels: jax.Array
    weights: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeLayout:
    """One decoding step: a context row that writes the cache and its duplicate that reads it.

    Attributes:
      tokens: [B] int32, the new token, embedded for both rows.
      positions: [B] int32, its rotary position, also the cache slot that it writes.
      lengths: [B] int32, filled cache slots with the new token included.
    """

    tokens: jax.Array
    positions: jax.Array
    lengths: jax.Array


def document_positions(segment_ids: jax.Array) -> jax.Array:
    """Position of every row within its document, [B, T] int32: 0 at the first row of each run of equal ids."""
    rows = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts_here = segment_ids != jnp.roll(segment_ids, 1, axis=1)
    start = jax.lax.cummax(jnp.where(starts_here, rows, 0), axis=1)
    return rows - start


def duplicate(rows: jax.Array, layout: Layout) -> jax.Array:
    """Copies the context rows [B, T, ...] that the output rows stand for, [B, P, ...]; padding rows copy row 0."""
    if layout.out_index is None:
        return rows
    index = jnp.maximum(layout.out_index, 0)
    return jnp.take_along_axis(rows, index.reshape(index.shape + (1,) * (rows.ndim - 2)), axis=1)


def pretraining(tokens: jax.Array, segment_ids: jax.Array | None = None) -> tuple[Layout, Targets]:
    """Every row predicts the next token of its document.

    Args:
      tokens: [B, T + 1] int32.
      segment_ids: [B, T + 1] int32, or None for one document a row.
    """
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    context = segment_ids[:, :-1]
    layout = Layout(tokens[:, :-1], document_positions(context), context, None)
    return layout, Targets(tokens[:, 1:], _continues(segment_ids).astype(jnp.float32))


def sampled_pretraining(
    tokens: jax.Array, segment_ids: jax.Array, scores: jax.Array, num_outputs: int
) -> tuple[Layout, Targets]:
    """Of the rows that predict the next token of their document, those with the lowest scores are duplicated.

    With random scores the loss and its gradient are unbiased estimates of `pretraining`'s, for less work.

    Args:
      tokens: [B, T + 1] int32.
      segment_ids: [B, T + 1] int32.
      scores: [B, T] float32, below 1.
      num_outputs: P, output rows of each sequence; the last ones are padding where fewer rows predict.
    """
    scores = jnp.where(_continues(segment_ids), scores, 1.0)
    limit = jnp.sort(scores, axis=1)[:, num_outputs - 1 : num_outputs]
    return _supervised(tokens, segment_ids, (scores <= limit) & (scores < 1), num_outputs)


def fine_tuning(
    tokens: jax.Array, segment_ids: jax.Array, response: jax.Array, num_outputs: int
) -> tuple[Layout, Targets]:
    """Only the rows that predict a response token are duplicated.

    Args:
      tokens: [B, T + 1] int32.
      segment_ids: [B, T + 1] int32.
      response: [B, T + 1] bool, True where a token is to be learnt.
      num_outputs: P, room for output rows; every example must need at most so many.

    Raises:
      ValueError: an example needs more than P output rows (checked only where the arrays are concrete, not traced).
    """
    num_rows = tokens.shape[1] - 1
    if num_outputs > num_rows:
        raise ValueError(f"num_outputs {num_outputs} exceeds the {num_rows} rows that can predict a token")
    predicts = _continues(segment_ids) & response[:, 1:]
    needed = predicts.sum(axis=1)
    if not isinstance(needed, Tracer) and needed.size and int(needed.max()) > num_outputs:
        raise ValueError(f"an example has {int(needed.max())} response tokens, more than num_outputs {num_outputs}")
    return _supervised(tokens, segment_ids, predicts, num_outputs)


def _supervised(tokens, segment_ids, predicts, num_outputs: int) -> tuple[Layout, Targets]:
    """Duplicates of the first P rows where `predicts` [B, T] holds, and padding after them."""
    num_rows = tokens.shape[1] - 1
    index = jnp.sort(jnp.where(predicts, jnp.arange(num_rows), num_rows), axis=1)[:, :num_outputs]
    is_row = index < num_rows
    context = segment_ids[:, :-1]
    layout = Layout(
        tokens[:, :-1], document_positions(context), context, jnp.where(is_row, index, -1).astype(jnp.int32)
    )
    labels = jnp.take_along_axis(tokens, jnp.where(is_row, index + 1, 0), axis=1)
    return layout, Targets(labels, is_row.astype(jnp.float32))


def prefill(tokens: jax.Array, lengths: jax.Array) -> Layout:
    """All rows of right-padded prompts, and one output row for the last token of each.

    Args:
      tokens: [B, T] int32, prompts with anything after them.
      lengths: [B] int32, tokens of each prompt; an empty prompt has a padding row as its output row.
    """
    rows = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    is_prompt = rows < lengths[:, None]
    positions = jnp.where(is_prompt, rows, 0)
    return Layout(tokens, positions, is_prompt.astype(jnp.int32), (lengths - 1).astype(jnp.int32)[:, None])


def decode(tokens: jax.Array, lengths: jax.Array) -> DecodeLayout:
    """The pair of rows of one step.

    Args:
      tokens: [B] int32, the token to append to each sequence.
      lengths: [B] int32, filled cache slots before the step.
    """
    return DecodeLayout(tokens, lengths, lengths + 1)


def _continues(segment_ids: jax.Array) -> jax.Array:
    """Whether row t and row t + 1 belong to the same document, [B, T] bool."""
    return (segment_ids[:, :-1] == segment_ids[:, 1:]) & (segment_ids[:, :-1] != 0)
