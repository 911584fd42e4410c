"""Small models with random weights, shared by the tests of the model."""

import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_kernels
from orthros_jax.config import ModelConfig
from orthros_jax.model import build_model
from orthros_jax.streams import Layout
from pallas_kernels.dual_stream_attention.api import Impl


def small_config(**changes) -> ModelConfig:
    """Three layers with N != K and H != D / N; 40 tokens, window 4."""
    settings: dict[str, Any] = {
        "vocab_size": 40,
        "num_layers": 3,
        "model_dim": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_dim": 20,
        "window": 4,
        "compute_dtype": "float32",
    }
    return ModelConfig(**(settings | changes))


@functools.cache
def graph_of(config: ModelConfig) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0))))[0]


def random_params(config: ModelConfig, seed: int = 0) -> dict:
    """Weights of order 1 after each product; norms, gammas and betas far from identity."""
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0))), nnx.Param))
    random = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        noise = random.normal(size=leaf.shape)
        if name in ("scale", "gamma"):
            value = 1 + 0.3 * noise
        elif name == "beta":
            value = 0.5 * noise
        elif path[0].key == "embedding":
            value = noise
        else:
            value = noise / np.sqrt(config.model_dim)
        return jnp.asarray(value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


# Compiling takes far longer than running; without optimisation it takes half the time.
fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def compute_logits(config: ModelConfig, params: dict, layout: Layout) -> jax.Array:
    model = nnx.merge(graph_of(config), params)
    return model.logits(model(layout))


logits = fast_jit(compute_logits, static_argnums=0)


def backends() -> list[str]:
    """Attention backends that work on this machine."""

    def works(impl):
        q = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
        try:
            jax.eval_shape(lambda q: pallas_kernels.dual_stream_attention(q, q, q, q, window=4, impl=impl), q)
        except (NotImplementedError, ValueError):
            return False
        return True

    return [impl for impl in get_args(Impl) if impl != "auto" and works(impl)]
