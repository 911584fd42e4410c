"""Operations of a model, counted exactly: the basis of MFU and of loss-against-FLOPs plots.

A multiply-add is two operations. Matrix products count every row that the layout computes: both streams, the last
layer's context rows for their keys and values alone. Attention counts the (query, key) pairs that are visible, so the
window, causality and document boundaries of a batch are counted as they are; 4 H operations a pair and head.
Element-wise work, the embedding lookup and recomputation are not counted. A training step is three forward passes.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from orthros_jax.config import ModelConfig
from orthros_jax.model.attention import KINDS
from orthros_jax.streams import Layout, duplicate

DEFINITION = (
    "model operations / (step time x devices x peak): 2 per multiply-add of the matrix products of both streams,\n"
    "         4 x head size per visible (query, key) pair and head, window and documents included; backward counts\n"
    "         twice; recomputation, element-wise work and the embedding lookup do not count"
)


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of one forward pass, per item.

    Attributes:
      context_row, output_row: matrix products of all layers and the head for one row of each stream.
      context_pair, output_pair: attention of all layers for one visible (query, key) pair of each stream.
    """

    context_row: int
    output_row: int
    context_pair: int
    output_pair: int

    def total(self, context_rows, output_rows, context_pairs, output_pairs):
        """Operations for these numbers of rows and of visible pairs in one layer."""
        return (
            context_rows * self.context_row
            + output_rows * self.output_row
            + context_pairs * self.context_pair
            + output_pairs * self.output_pair
        )


def forward_flops(config: ModelConfig) -> ForwardFlops:
    """Closed form for one model."""
    kind = KINDS[config.kind](config)
    hidden = config.num_layers - 1
    query = output = 2 * config.model_dim * config.num_heads * config.head_dim
    key_value = 2 * 2 * config.model_dim * config.num_kv_heads * config.head_dim
    ffn = 3 * 2 * config.model_dim * config.ffn_dim
    layer = query + output + ffn
    pair = 4 * config.num_heads * config.head_dim
    output_layers = 1 + (hidden if kind.doubled else 0)
    return ForwardFlops(
        context_row=hidden * (layer + key_value) + key_value,
        output_row=output_layers * layer + 2 * config.model_dim * config.vocab_size,
        context_pair=hidden * pair,
        output_pair=output_layers * pair,
    )


def visible_pairs(config: ModelConfig, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Visible (query, key) pairs of the context and of the output stream in one layer, float32 scalars."""
    kind = KINDS[config.kind](config)
    is_row = jnp.ones_like(layout.tokens, bool) if layout.segment_ids is None else layout.segment_ids != 0
    is_output = duplicate(is_row, layout)
    if layout.out_index is not None:
        is_output &= layout.out_index >= 0

    def pairs(positions, mask, window):
        keys = positions + 1 if window is None else jnp.minimum(positions + 1, window)
        return jnp.where(mask, keys, 0).sum(dtype=jnp.float32)

    context = pairs(layout.positions, is_row, kind.context_window)
    return context, pairs(duplicate(layout.positions, layout), is_output, kind.output_window)


def sequence_flops(config: ModelConfig, length: int) -> int:
    """Operations of one training step per sequence of `length` rows that is one document."""
    kind = KINDS[config.kind](config)

    def pairs(window):
        w = length if window is None else min(window, length)
        return w * (w + 1) // 2 + (length - w) * w

    forward = forward_flops(config)
    return 3 * forward.total(length, length, pairs(kind.context_window), pairs(kind.output_window))
