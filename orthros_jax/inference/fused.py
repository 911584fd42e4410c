"""Layers with fewer, larger products: one for query, key and value and one for gate and up.

Decoding is bound by the bytes of the weights and by the number of products, and prefill by the products' speed. Fused
kernels are made once, when the weights are placed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from orthros_jax.config import ModelConfig
from orthros_jax.model.attention import Attention
from orthros_jax.model.language_model import Layer
from orthros_jax.model.layers import Linear, apply_rope


class FusedAttention(Attention):
    """Attention whose first stream's queries, keys and values come from one product.

    The kernel is [D, K, G + 2, H], G = N / K: the queries of a key/value head, its key, its value. So a device that has
    some of the heads has all that they need.
    """

    def __init__(self, config: ModelConfig, *, last: bool, rngs: nnx.Rngs):
        super().__init__(config, last=last, rngs=rngs)
        self.group = config.num_heads // config.num_kv_heads
        query = "query" if hasattr(self, "query") else "query_output" if last else "query_context"
        for name in (query, "key", "value"):
            delattr(self, name)
        self.query_key_value = Linear(
            (config.model_dim,), (config.num_kv_heads, self.group + 2, config.head_dim), config, rngs
        )

    def project(self, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, T, N, H], keys and values [B, T, K, H] as the product makes them of normalised rows [B, T, D]."""
        fused = self.query_key_value(rows)
        q, k, v = fused[..., : self.group, :], fused[..., self.group, :], fused[..., self.group + 1, :]
        return q.reshape(*q.shape[:2], -1, q.shape[-1]), k, v

    def rotated_keys(self, k: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Keys [B, T, K, H], normalised where the model does that, and rotated."""
        return apply_rope(self.key_norm(k) if self.config.qk_norm else k, rope)


class FusedSwiGLU(nnx.Module):
    """SwiGLU with one kernel [D, 2, F] for gate and up."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.gate_up = Linear((config.model_dim,), (2, config.ffn_dim), config, rngs)
        self.down = Linear((config.ffn_dim,), (config.model_dim,), config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        both = self.gate_up(x)
        return self.down(jax.nn.silu(both[..., 0, :]) * both[..., 1, :])


def fused_layer(config: ModelConfig, *, last: bool) -> Layer:
    """A layer of fused modules."""
    layer: Any = Layer(config, last=last, rngs=nnx.Rngs(0))
    layer.attention = FusedAttention(config, last=last, rngs=nnx.Rngs(0))
    layer.ffn = FusedSwiGLU(config, nnx.Rngs(0))
    return layer


def fuse(layer: dict[str, Any], *, last: bool) -> dict[str, Any]:
    """The parameters of a `fused_layer` from those of a `Layer`."""
    attention, ffn = dict(layer["attention"]), dict(layer["ffn"])
    stream = "output" if last else "context"
    query = attention.pop("query" if "query" in attention else f"query_{stream}")["kernel"]
    key, value = (attention.pop(name)["kernel"] for name in ("key", "value"))
    query = query.reshape(key.shape[0], key.shape[1], -1, key.shape[2])
    kernel = jnp.concatenate([query, key[:, :, None], value[:, :, None]], axis=2)
    gate_up = jnp.stack([ffn.pop("gate")["kernel"], ffn.pop("up")["kernel"]], axis=1)
    return layer | {
        "attention": attention | {"query_key_value": {"kernel": kernel}},
        "ffn": ffn | {"gate_up": {"kernel": gate_up}},
    }
