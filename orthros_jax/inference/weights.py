"""Parameters as inference uses them: one tree a layer, matrices in the compute type, placed on the devices.

Training keeps its hidden layers stacked. A program that runs a token or a chunk through the layers would copy each
layer's weights out of the stack, once a step.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from orthros_jax.config import ModelConfig
from orthros_jax.model import LanguageModel, build_model
from orthros_jax.model.language_model import Layer
from orthros_jax.sharding import parameter_spec

Weights = dict[str, Any]
"""`layers`, a tuple of the hidden layers' trees, and the other parameters as in training."""


def inference_weights(params: dict, config: ModelConfig, mesh: Mesh | None = None) -> Weights:
    """Parameters of the training layout, or weights that this function made, ready for the programs.

    Matrices are rounded to the compute type, which the model does with each use anyway. One array at a time is moved.
    """
    place = functools.partial(_place, config=config, mesh=mesh)
    rest = {name: tree for name, tree in params.items() if name != "layers"}
    stacked = params.get("layers", ())
    if isinstance(stacked, dict):
        num_hidden = config.num_layers - 1
        layers = tuple(
            jax.tree_util.tree_map_with_path(lambda path, x, i=i: place(path, x[i]), stacked) for i in range(num_hidden)
        )
    else:
        layers = tuple(jax.tree_util.tree_map_with_path(place, layer) for layer in stacked)
    return jax.tree_util.tree_map_with_path(place, rest) | {"layers": layers}


def weight_shapes(config: ModelConfig) -> Weights:
    """Shapes and types of `inference_weights`."""

    def shape(path, x):
        return jax.ShapeDtypeStruct(x.shape, _dtype(path, x.dtype, config))

    graphs = _graphs(config)
    hidden, rest = (jax.tree_util.tree_map_with_path(shape, params) for _, params in graphs)
    return rest | {"layers": (hidden,) * (config.num_layers - 1)}


def merge(weights: Weights, config: ModelConfig) -> tuple[list[Layer], LanguageModel]:
    """The hidden layers, and a model that has all the rest: embedding, last layer, final norm and head."""
    (hidden, _), (rest, _) = _graphs(config)
    layers = [nnx.merge(hidden, tree) for tree in weights["layers"]]
    return layers, nnx.merge(rest, {name: tree for name, tree in weights.items() if name != "layers"})


@functools.cache
def _graphs(config: ModelConfig):
    """(graph, parameter shapes) of a hidden layer and of the model without hidden layers."""
    without_layers = dataclasses.replace(config, num_layers=1)
    models = (
        nnx.eval_shape(lambda: Layer(config, last=False, rngs=nnx.Rngs(0))),
        nnx.eval_shape(lambda: build_model(without_layers, nnx.Rngs(0))),
    )
    return tuple((nnx.split(model)[0], nnx.to_pure_dict(nnx.state(model, nnx.Param))) for model in models)


def _place(path, x, config: ModelConfig, mesh: Mesh | None) -> jax.Array:
    names = tuple(key.key for key in path)
    sharding = None if mesh is None else NamedSharding(mesh, parameter_spec(names, x.ndim))
    return jax.device_put(x, sharding).astype(_dtype(path, x.dtype, config))


def _dtype(path, dtype, config: ModelConfig):
    return jnp.dtype(config.compute_dtype) if path[-1].key == "kernel" else dtype
