"""The device programs of inference: a chunk of a prompt, its output rows, and one decoded token.

Prefill runs context rows in chunks: a hidden layer with a window needs no more of the past than its halo, so that
activations grow with the chunk and not with the prompt. The last layer's context rows make keys and values only. The
output row of each prompt runs once at the end, over the whole cache. Decode runs both rows of a token side by side, so
that weights and cache are read once. Programs are unrolled over the layers: each has its own weights and cache, which a
loop over stacked arrays would copy.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from orthros_jax import streams
from orthros_jax.config import ModelConfig
from orthros_jax.inference.cache import CacheLayout, LayerCache
from orthros_jax.inference.cached_attention import Halo, chunk_attention, token_attention
from orthros_jax.inference.fused import FusedAttention
from orthros_jax.inference.weights import Weights, hidden_layer, outer_model
from orthros_jax.model.attention import KINDS
from orthros_jax.model.language_model import Layer
from orthros_jax.model.layers import rope_table
from orthros_jax.sharding import BATCH_AXES


class Prefill(NamedTuple):
    """What prefill carries from chunk to chunk.

    Attributes:
      caches: one a layer.
      halos: one a hidden layer, None for models whose context rows see the whole past.
      rows: [B, D], what the output rows start from: the embedding of each prompt's last token or, in single-stream
        models, the last context row before the last layer. Junk until that row has been seen.
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
    model = outer_model(weights, config)
    doubled = KINDS[config.kind](config).doubled
    static = {"config": config, "layout": layout, "is_first": is_first}
    x = _constrain(model.embedding(tokens), layout)
    rope = rope_table(start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], config)
    rows = _take_last(x, state.rows, start, lengths) if doubled else state.rows
    caches, halos = list(state.caches), list(state.halos)
    for i, layer in enumerate(weights["layers"]):
        x, caches[i], halos[i] = _chunk_layer(layer, x, caches[i], halos[i], rope, start, lengths, **static)
    attention = model.last_layer.attention
    _, k, v = attention.project(model.last_layer.attention_norm(x))
    k = attention.rotated_keys(k, rope)
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
    model = outer_model(weights, config)
    x, rope = rows[:, None], rope_table(lengths[:, None] - 1, config)
    static = {"config": config, "layout": layout}
    if KINDS[config.kind](config).doubled:
        for layer, cache in zip(weights["layers"], caches[:-1], strict=True):
            x = _output_layer(layer, x, cache, rope, lengths, **static)
    x = _output_rows(model.last_layer, x, caches[-1], rope, lengths, **static)
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
    model = outer_model(weights, config)
    kind = KINDS[config.kind](config)
    step = streams.decode(tokens, lengths)
    rope = rope_table(step.positions[:, None], config)
    x = model.embedding(step.tokens)[:, None]
    if kind.doubled:
        x = jnp.repeat(x, 2, axis=1)
    static = {"config": config, "layout": layout}
    written = list(caches)
    for i, layer in enumerate(weights["layers"]):
        x, written[i] = _token_layer(layer, x, caches[i], rope, step.lengths, **static)
    last = model.last_layer
    q, k, v = last.attention.project(last.attention_norm(x))
    q = last.attention.specialise("output", q[:, -1:], rope)
    new = last.attention.rotated_keys(k[:, :1], rope), v[:, :1]
    attended, written[-1] = token_attention(
        q, caches[-1], step.lengths, windows=(kind.output_window,), new=new, **static
    )
    x = _feed_forward(last, x[:, -1:] + last.attention.output(attended))
    return tuple(written), step.lengths, model.logits(model.final_norm(x[:, 0]))


# Each kind of layer is jitted by itself: it is traced and lowered once for all layers of a program. XLA inlines it.


@partial(jax.jit, static_argnames=("config", "layout", "is_first"))
def _chunk_layer(tree, x, cache, halo, rope, start, lengths, *, config, layout, is_first):
    """Context rows [B, X * C, D] through a hidden layer; also its cache and next halo."""
    layer = hidden_layer(tree, config)
    q, k, v = layer.attention.project(layer.attention_norm(x))
    q, k = layer.attention.specialise("context", q, rope), layer.attention.rotated_keys(k, rope)
    attended, cache, halo = chunk_attention(
        q, k, v, cache, halo, start, lengths, config=config, layout=layout, is_first=is_first
    )
    x = _feed_forward(layer, _constrain(x + layer.attention.output(attended), layout))
    return _constrain(x, layout), cache, halo


@partial(jax.jit, static_argnames=("config", "layout"))
def _output_layer(tree, x, cache, rope, lengths, *, config, layout):
    """Output rows [B, 1, D] through a hidden layer."""
    return _output_rows(hidden_layer(tree, config), x, cache, rope, lengths, config=config, layout=layout)


def _output_rows(layer, x, cache, rope, lengths, *, config, layout):
    attention, h = layer.attention, layer.attention_norm(x)
    q = attention.specialise("output", _output_queries(attention, h, attention.project(h)[0]), rope)
    window = KINDS[config.kind](config).output_window
    attended, _ = token_attention(q, cache, lengths, windows=(window,), new=None, config=config, layout=layout)
    return _feed_forward(layer, x + attention.output(attended))


@partial(jax.jit, static_argnames=("config", "layout"))
def _token_layer(tree, x, cache, rope, lengths, *, config, layout):
    """A token's rows [B, R, D], its context row first, through a hidden layer; also its cache."""
    layer, kind = hidden_layer(tree, config), KINDS[config.kind](config)
    attention, h = layer.attention, layer.attention_norm(x)
    q, k, v = attention.project(h)
    queries, windows = [attention.specialise("context", q[:, :1], rope)], (kind.context_window,)
    if kind.doubled:
        q_out = _output_queries(attention, h[:, 1:], q[:, 1:])
        queries.append(attention.specialise("output", q_out, rope))
        windows = (kind.context_window, kind.output_window)
    new = attention.rotated_keys(k[:, :1], rope), v[:, :1]
    attended, cache = token_attention(
        jnp.concatenate(queries, axis=1), cache, lengths, windows=windows, new=new, config=config, layout=layout
    )
    return _feed_forward(layer, x + attention.output(attended)), cache


def _output_queries(attention: FusedAttention, rows: jax.Array, fused: jax.Array) -> jax.Array:
    """Projected queries of output rows: those of the fused product, unless hidden layers have a projection for each."""
    separate = getattr(attention, "query_output", None)
    return fused if separate is None else separate(rows)


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
