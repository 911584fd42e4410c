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
        h = layer.attention_norm(x)
        q = layer.attention.query_rows("context", h, rope)
        k, v = layer.attention.keys_and_values(h, rope)
        attended, caches[i], halos[i] = chunk_attention(q, k, v, caches[i], halos[i], start, lengths, **static)
        x = _feed_forward(layer, _constrain(x + layer.attention.output(attended), layout))
        x = _constrain(x, layout)
    last = model.last_layer
    k, v = last.attention.keys_and_values(last.attention_norm(x), rope)
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
        q = layer.attention.query_rows("output", layer.attention_norm(x), rope)
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
        written = layer.attention.keys_and_values(h[:, :1], rope)
        attended, caches_out[i] = token_attention(
            _token_queries(layer, h, rope), caches[i], step.lengths, windows=windows, written=written, **static
        )
        x = _feed_forward(layer, x + layer.attention.output(attended))
    last = model.last_layer
    h = last.attention_norm(x)
    q = last.attention.query_rows("output", h[:, -1:], rope)
    written = last.attention.keys_and_values(h[:, :1], rope)
    attended, caches_out[-1] = token_attention(
        q, caches[-1], step.lengths, windows=(kind.output_window,), written=written, **static
    )
    x = _feed_forward(last, x[:, -1:] + last.attention.output(attended))
    return tuple(caches_out), step.lengths, model.logits(model.final_norm(x[:, 0]))


def _token_queries(layer: Layer, h: jax.Array, rope) -> jax.Array:
    """Queries [B, R, N, H] of a token's context row and, in models of two streams, its output row."""
    attention = layer.attention
    if h.shape[1] == 1:
        return attention.query_rows("context", h, rope)
    names = ("context", "output")
    if hasattr(attention, "query"):
        # One product for both rows: decoding is bound by the bytes of the weights.
        projected = attention.query(h)
    else:
        projected = jnp.concatenate([attention.query_projection(n)(h[:, i, None]) for i, n in enumerate(names)], axis=1)
    queries = [attention.specialise(name, projected[:, i, None], rope) for i, name in enumerate(names)]
    return jnp.concatenate(queries, axis=1)


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
