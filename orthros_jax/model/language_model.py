"""The language model: embedding, L - 1 stacked layers, one last layer, head. All kinds of model share it."""

import functools

import jax
from flax import nnx

from orthros_jax.config import ModelConfig
from orthros_jax.model.attention import Attention, Streams, output_rope
from orthros_jax.model.layers import Embedding, Linear, RMSNorm, SwiGLU, rope_table
from orthros_jax.sharding import constrain_rows
from orthros_jax.streams import Layout, duplicate

_ATTENTION_RESULTS = jax.checkpoint_policies.save_only_these_names("attention_output", "attention_lse")
_REMAT_POLICIES = {
    # Attention's own products have batch axes, so saving dots alone would run its forward pass again.
    "save_dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _ATTENTION_RESULTS
    ),
    "save_attention": _ATTENTION_RESULTS,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Layer(nnx.Module):
    """x += attention(norm(x)); x += SwiGLU(norm(x)) on the rows of each stream that the layer runs."""

    def __init__(self, config: ModelConfig, *, last: bool, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.model_dim, config)
        self.attention = Attention(config, last=last, rngs=rngs)
        self.ffn_norm = RMSNorm(config.model_dim, config)
        self.ffn = SwiGLU(config, rngs)

    def __call__(self, rows: Streams, layout: Layout, rope: Streams) -> Streams:
        """Rows in, rows out: context [B, T, D] and output [B, P, D]; the last layer returns output rows alone."""
        normalised = Streams(*(None if x is None else self.attention_norm(x) for x in rows))
        attended = self.attention(normalised, layout, rope)
        return Streams(*(None if a is None else self._feed_forward(x + a) for x, a in zip(rows, attended, strict=True)))

    def _feed_forward(self, x: jax.Array) -> jax.Array:
        return constrain_rows(x + self.ffn(self.ffn_norm(x)))


class LanguageModel(nnx.Module):
    """Tokens and layout to hidden rows that predict, for every kind of model.

    Parameters lie in L - 1 stacked layers, which a scan runs, and one last layer: it has no queries, output projection
    or feed-forward rows for the context stream, and slicing it out of a stack would copy the weights.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config, rngs)
        if config.num_layers > 1:

            @nnx.split_rngs(splits=config.num_layers - 1)
            @nnx.vmap
            def stack(rngs: nnx.Rngs) -> Layer:
                return Layer(config, last=False, rngs=rngs)

            self.layers = stack(rngs)
        self.last_layer = Layer(config, last=True, rngs=rngs)
        self.final_norm = RMSNorm(config.model_dim, config)
        if not config.tie_embeddings:
            self.head = Linear((config.model_dim,), (config.vocab_size,), config, rngs)

    def __call__(self, layout: Layout) -> jax.Array:
        """Final normalised output rows, [B, P, D] in the compute type."""
        embedded = constrain_rows(self.embedding(layout.tokens))
        context_rope = rope_table(layout.positions, self.config)
        rope = Streams(context_rope, output_rope(context_rope, layout))
        doubled = self.last_layer.attention.kind.doubled
        rows = Streams(embedded, duplicate(embedded, layout) if doubled else None)
        if self.config.num_layers > 1:
            rows = self._hidden_layers(rows, layout, rope)
        if not doubled:
            rows = Streams(rows.context, duplicate(rows.context, layout))
        rows = self._remat(lambda rows: self.last_layer(rows, layout, rope))(rows)
        return self.final_norm(rows.output)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of the next token, [..., D] to [..., V] in the statistics type. Training uses the chunked loss."""
        kernel = self.head_kernel()
        return jax.numpy.matmul(
            hidden, kernel.astype(hidden.dtype), preferred_element_type=self.config.statistics_dtype
        )

    def head_kernel(self) -> jax.Array:
        """Output head, [D, V]."""
        return self.embedding.kernel[...].T if self.config.tie_embeddings else self.head.kernel[...]

    def _hidden_layers(self, rows: Streams, layout: Layout, rope: Streams) -> Streams:
        graph, stacked = nnx.split(self.layers)

        def body(rows: Streams, parameters):
            return nnx.merge(graph, parameters)(rows, layout, rope), None

        return jax.lax.scan(self._remat(body), rows, stacked, unroll=self.config.unroll)[0]

    def _remat(self, function):
        if self.config.remat == "none":
            return function
        return functools.partial(jax.checkpoint, policy=_REMAT_POLICIES[self.config.remat])(function)
