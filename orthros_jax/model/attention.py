"""Attention modules: projections, query specialisation and positions around the kernels' operations.

A hidden layer of Orthros runs both streams; a hidden layer of a single-stream model runs context rows alone; the last
layer of every model runs output rows alone, since nothing reads its context rows but the keys and values they make.
"""

import functools
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

import pallas_kernels
from orthros_jax.config import ModelConfig
from orthros_jax.model.context import attend_context
from orthros_jax.model.layers import Linear, RMSNorm, ScaleOffset, apply_rope
from orthros_jax.sharding import on_each_device, rows_spec
from orthros_jax.streams import Layout, duplicate


class Streams(NamedTuple):
    """One value for each stream, None where a stream has no rows."""

    context: Any
    output: Any


class Kind(NamedTuple):
    """What distinguishes a kind of model; see `KINDS`.

    Attributes:
      doubled: hidden layers run output rows beside the context rows.
      context_window: keys that a context row sees, None for all up to its own.
      output_window: the same for output rows.
    """

    doubled: bool
    context_window: int | None
    output_window: int | None


KINDS = {
    "orthros": lambda config: Kind(True, config.window, config.output_window),
    "transformer": lambda config: Kind(False, None, None),
    "sliding_window": lambda config: Kind(False, config.window, config.window),
}


class Attention(nnx.Module):
    """Attention of the context rows, the output rows, or both, over keys and values of the context rows.

    Order on the query: projection, normalisation, scale-offset, rotation (`scale_offset_position: before_norm` swaps
    the middle two); on the key: projection, normalisation, rotation.

    Args:
      last: the model's last layer, which has queries for output rows only.
    """

    def __init__(self, config: ModelConfig, *, last: bool, rngs: nnx.Rngs):
        self.config = config
        self.kind = KINDS[config.kind](config)
        self.runs = Streams(context=not last, output=last or self.kind.doubled)
        model, heads = (config.model_dim,), (config.num_heads, config.head_dim)
        kv_heads = (config.num_kv_heads, config.head_dim)
        names = [name for name, runs in self.runs._asdict().items() if runs]
        if self.kind.doubled and config.query_sharing == "separate":
            for name in names:
                setattr(self, f"query_{name}", Linear(model, heads, config, rngs))
        else:
            self.query = Linear(model, heads, config, rngs)
        if self.kind.doubled and config.query_sharing == "scale_offset":
            for name in names:
                setattr(self, f"scale_offset_{name}", ScaleOffset(config))
        self.key = Linear(model, kv_heads, config, rngs)
        self.value = Linear(model, kv_heads, config, rngs)
        self.output = Linear(heads, model, config, rngs)
        if config.qk_norm:
            self.query_norm = RMSNorm(config.head_dim, config)
            self.key_norm = RMSNorm(config.head_dim, config)

    def __call__(self, rows: Streams, layout: Layout, rope: Streams) -> Streams:
        """Attends and projects back.

        Args:
          rows: normalised rows, context [B, T, D] and output [B, P, D].
          layout: positions, segments and output index.
          rope: rotary tables of both streams.

        Returns:
          [B, T, D] and [B, P, D] for the streams that this layer runs, None for the other.
        """
        k = self.key(rows.context)
        if self.config.qk_norm:
            k = self.key_norm(k)
        k, v = apply_rope(k, rope.context), self.value(rows.context)
        q = Streams(
            *(self._query(name, getattr(rows, name), getattr(rope, name)) if runs else None
              for name, runs in self.runs._asdict().items())
        )  # fmt: skip
        attended = attend(q, k, v, layout, self.kind, self.config.attention_impl)
        return Streams(*(None if o is None else self.output(o) for o in attended))

    def _query(self, stream: str, rows: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        project = self.query if hasattr(self, "query") else getattr(self, f"query_{stream}")
        return self.specialise(stream, project(rows), rope)

    def specialise(self, stream: str, q: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        """What one stream makes of projected queries [B, P, N, H]: norm, scale and offset, rotation."""
        steps = [getattr(self, "query_norm", None), getattr(self, f"scale_offset_{stream}", None)]
        if self.config.scale_offset_position == "before_norm":
            steps.reverse()
        for step in steps:
            q = q if step is None else step(q)
        return apply_rope(q, rope)


def attend(q: Streams, k: jax.Array, v: jax.Array, layout: Layout, kind: Kind, impl: str) -> Streams:
    """The kernel operation for the streams that have queries, on each device's own batch rows and heads."""

    def operation(q: Streams, k, v, segment_ids, out_index):
        mask = {"segment_ids": segment_ids, "impl": impl}
        if q.output is None:
            window = kind.context_window
            if window is None:
                return Streams(pallas_kernels.cross_attention(q.context, k, v, **mask), None)
            return Streams(pallas_kernels.sliding_window_attention(q.context, k, v, window=window, **mask), None)
        mask["out_index"] = out_index
        if q.context is None:
            return Streams(None, pallas_kernels.cross_attention(q.output, k, v, window=kind.output_window, **mask))
        windows = {"window": kind.context_window, "out_window": kind.output_window}
        return Streams(*pallas_kernels.dual_stream_attention(q.context, q.output, k, v, **windows, **mask))

    lengths = [x.shape[1] for x in (k, *q) if x is not None]
    rows = rows_spec(*lengths)
    heads = P(*rows, "tensor", None)
    queries = Streams(*(None if x is None else heads for x in q))
    optional_rows = [None if x is None else rows for x in (layout.segment_ids, layout.out_index)]
    function = operation if rows[1] is None else functools.partial(_attend_part, kind=kind, impl=impl)
    in_specs = (queries, heads, heads, *optional_rows)
    return on_each_device(function, in_specs, queries)(q, k, v, layout.segment_ids, layout.out_index)


def _attend_part(q: Streams, k, v, segment_ids, out_index, *, kind: Kind, impl: str) -> Streams:
    """The same where each device has a part of every sequence; each stream then needs other keys."""
    windows = Streams(kind.context_window, kind.output_window)
    indices = Streams(None, out_index)
    return Streams(
        *(
            None if x is None else attend_context(x, k, v, segment_ids, index, window, impl)
            for x, index, window in zip(q, indices, windows, strict=True)
        )
    )


def output_rope(rope: tuple[jax.Array, jax.Array], layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Rotary tables of the output rows: a duplicate has its original's position."""
    cos, sin = rope
    return duplicate(cos, layout), duplicate(sin, layout)
