"""The device programs of inference: a chunk of a prompt, its output rows, and one decoded token.

Prefill runs context rows in chunks: a hidden layer with a window needs no more of the past than its halo, so that
activations grow with the chunk and not with the prompt. The last layer's context rows make keys and values only. The
output row of each prompt runs once at the end, over the whole cache. Decode runs both rows of a token side by side, so
that weights and cache are read once. All layers are unrolled: each has its own weights and cache, which a loop over
stacked arrays would copy.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from orthros_jax import streams
from orthros_jax.config import ModelConfig
from orthros_jax.inference.cache import CacheLayout, LayerCache
from orthros_jax.inference.cached_attention import Halo, chunk_attention, token_attention
from orthros_jax.inference.weights import Weights, merge
from orthros_jax.model.attention import KINDS
from orthros_jax.model.language_model import LanguageModel, Layer
from orthros_jax.model.layers import rope_table
from orthros_jax.sharding import BATCH_AXES


class Prefill(NamedTuple):
    """What prefill carries from chunk to chunk.

    Attributes:
      caches: one a layer.
      halos: one a hidden layer, None for models whose context rows see the whole past.
      rows: [B, D], what the output rows start from: the embedding of each prompt's last token or, in single-stream models,
        the last context row before the last layer. Junk until that row has been seen.
    """

    caches: tuple[LayerCache, ...]
    halos: tuple[Halo | None, ...]
    rows: jax.Array


def prefill_chunk(
    weights: Weights,
    state: Prefill,
    tokens: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    config: ModelConfig,
    layout: CacheLayout,
    is_first: bool,
) -> Prefill:
    """Context rows `start` and on of each prompt: tokens [B, X * C], lengths [B] of the whole prompts."""
    hidden, model = merge(weights, config)
    doubled = KINDS[config.kind](config).doubled
    static = {"config": config, "layout": layout, "is_first": is_first}
    x = _constrain(model.embedding(tokens), layout)
    positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    rope = rope_table(positions[None], config)
    rows = _take_last(x, state.rows, start, lengths) if doubled else state.rows
    caches, halos = list(state.caches), list(state.halos)
    for i, layer in enumerate(hidden):
        q, k, v = layer.attention.project(layer.attention_norm(x))
        q, k = layer.attention.specialise("context", q, rope), layer.attention.rotated_keys(k, rope)
        attended, caches[i], halos[i] = chunk_attention(q, k, v, caches[i], halos[i], start, lengths, **static)
        x = _feed_forward(layer, _constrain(x + layer.attention.output(attended), layout))
        x = _constrain(x, layout)
    last = model.last_layer
    _, k, v = last.attention.project(last.attention_norm(x))
    k = last.attention.rotated_keys(k, rope)
    _, caches[-1], _ = chunk_attention(None, k, v, caches[-1], None, start, lengths, **static)
    if not doubled:
        rows = _take_last(x, rows, start, lengths)
    return Prefill(tuple(caches), tuple(halos), rows)


def prefill_output(
    weights: Weights,
    caches: tuple[LayerCache, ...],
    rows: jax.Array,
    lengths: jax.Array,
    *,
    config: ModelConfig,
    layout: CacheLayout,
) -> jax.Array:
    """Logits [B, V] of the output rows over the filled cache; `rows` [B, D] is that of `Prefill`."""
    hidden, model = merge(weights, config)
    kind = KINDS[config.kind](config)
    x, rope = rows[:, None], rope_table(lengths[:, None] - 1, config)
    layers = [*(hidden if kind.doubled else ()), model.last_layer]
    for layer, cache in zip(layers, caches[-len(layers) :], strict=True):
        q = layer.attention.specialise("output", _output_queries(layer, layer.attention_norm(x)), rope)
        attended, _ = token_attention(
            q, cache, lengths, windows=(kind.output_window,), written=None, config=config, layout=layout
        )
        x = _feed_forward(layer, x + layer.attention.output(attended))
    return model.logits(model.final_norm(x[:, 0]))


def decode_token(
    weights: Weights,
    caches: tuple[LayerCache, ...],
    lengths: jax.Array,
    tokens: jax.Array,
    *,
    config: ModelConfig,
    layout: CacheLayout,
) -> tuple[tuple[LayerCache, ...], jax.Array, jax.Array]:
    """Appends a token [B] to each sequence: the caches, the new lengths [B] and the logits [B, V] that follow."""
    hidden, model = merge(weights, config)
    kind = KINDS[config.kind](config)
    step = streams.decode(tokens, lengths)
    rope = rope_table(step.positions[:, None], config)
    x = model.embedding(step.tokens)[:, None]
    windows: tuple[int | None, ...] = (kind.context_window,)
    if kind.doubled:
        x, windows = jnp.repeat(x, 2, axis=1), (kind.context_window, kind.output_window)
    static = {"config": config, "layout": layout}
    caches_out = list(caches)
    for i, layer in enumerate(hidden):
        h = layer.attention_norm(x)
        q, k, v = layer.attention.project(h)
        queries = [layer.attention.specialise("context", q[:, :1], rope)]
        if kind.doubled:
            separate = getattr(layer.attention, "query_output", None)
            q_out = q[:, 1:] if separate is None else separate(h[:, 1:])
            queries.append(layer.attention.specialise("output", q_out, rope))
        written = layer.attention.rotated_keys(k[:, :1], rope), v[:, :1]
        attended, caches_out[i] = token_attention(
            jnp.concatenate(queries, axis=1), caches[i], step.lengths, windows=windows, written=written, **static
        )
        x = _feed_forward(layer, x + layer.attention.output(attended))
    last = model.last_layer
    q, k, v = last.attention.project(last.attention_norm(x))
    q = last.attention.specialise("output", q[:, -1:], rope)
    written = last.attention.rotated_keys(k[:, :1], rope), v[:, :1]
    attended, caches_out[-1] = token_attention(
        q, caches[-1], step.lengths, windows=(kind.output_window,), written=written, **static
    )
    x = _feed_forward(last, x[:, -1:] + last.attention.output(attended))
    return tuple(caches_out), step.lengths, model.logits(model.final_norm(x[:, 0]))


def _output_queries(layer: Layer, rows: jax.Array) -> jax.Array:
    """Projected queries [B, P, N, H] of output rows: not the fused product's where hidden layers have a projection each."""
    separate = getattr(layer.attention, "query_output", None)
    return layer.attention.project(rows)[0] if separate is None else separate(rows)


def _feed_forward(layer: Layer, x: jax.Array) -> jax.Array:
    return x + layer.ffn(layer.ffn_norm(x))


def _take_last(x: jax.Array, rows: jax.Array, start: jax.Array, lengths: jax.Array) -> jax.Array:
    """Row lengths - 1 of each sequence, from x [B, C, D] where it lies in this chunk, else from rows [B, D]."""
    row = lengths - 1 - start
    is_here = (row >= 0) & (row < x.shape[1])
    taken = jnp.take_along_axis(x, jnp.clip(row, 0, x.shape[1] - 1)[:, None, None], axis=1)[:, 0]
    return jnp.where(is_here[:, None], taken, rows)


def _constrain(x: jax.Array, layout: CacheLayout) -> jax.Array:
    """Keeps a chunk's activations [B, C, D] split over batch and context, so that weights are gathered instead."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, P(BATCH_AXES, "context" if layout.shards > 1 else None))
