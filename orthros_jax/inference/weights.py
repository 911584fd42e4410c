"""Parameters as inference uses them: one tree a layer, matrices in the compute type, placed on the devices.

Training keeps its hidden layers stacked. A program that runs a token or a chunk through the layers would copy each
layer's weights out of the stack, once a step. Layers are fused, see `fused.py`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from orthros_jax.config import ModelConfig
from orthros_jax.inference.fused import fuse, fused_layer
from orthros_jax.model import build_model
from orthros_jax.sharding import parameter_spec

Weights = dict[str, Any]
"""`layers`, a tuple of the hidden layers' trees, and the other parameters as in training."""


def inference_weights(params: dict, config: ModelConfig, mesh: Mesh | None = None) -> Weights:
    """Parameters of the training layout, or weights of `weight_shapes`, ready for the programs.

    Matrices are rounded to the compute type, which the model does with each use anyway. A layer at a time is moved.
    """
    place = functools.partial(jax.tree_util.tree_map_with_path, functools.partial(_place, config=config, mesh=mesh))
    if isinstance(params.get("layers", ()), tuple) and "gate_up" in params["last_layer"]["ffn"]:
        return place(params)

    def fused(layer, last):
        return place(fuse(place(layer), last=last))

    layers = tuple(
        fused(jax.tree.map(lambda x, i=i: x[i], params["layers"]), last=False) for i in range(config.num_layers - 1)
    )
    rest = {name: tree for name, tree in params.items() if name not in ("layers", "last_layer")}
    return place(rest) | {"layers": layers, "last_layer": fused(params["last_layer"], last=True)}


def weight_shapes(config: ModelConfig) -> Weights:
    """Shapes and types of `inference_weights`."""

    def shape(path, x):
        return jax.ShapeDtypeStruct(x.shape, _dtype(path, x.dtype, config))

    hidden, rest = (jax.tree_util.tree_map_with_path(shape, params) for _, params in _graphs(config))
    return rest | {"layers": (hidden,) * (config.num_layers - 1)}


def hidden_layer(tree: dict[str, Any], config: ModelConfig) -> Any:
    """A hidden `fused_layer` with its parameters."""
    return nnx.merge(_graphs(config)[0][0], tree)


def outer_model(weights: Weights, config: ModelConfig) -> Any:
    """A `LanguageModel` of all but the hidden layers: embedding, fused last layer, final norm and head."""
    return nnx.merge(_graphs(config)[1][0], {name: tree for name, tree in weights.items() if name != "layers"})


@functools.cache
def _graphs(config: ModelConfig):
    """(graph, parameter shapes) of a hidden layer and of the model without hidden layers."""

    def rest():
        model = build_model(dataclasses.replace(config, num_layers=1), nnx.Rngs(0))
        model.last_layer = fused_layer(config, last=True)
        return model

    models = nnx.eval_shape(lambda: fused_layer(config, last=False)), nnx.eval_shape(rest)
    return tuple((nnx.split(model)[0], nnx.to_pure_dict(nnx.state(model, nnx.Param))) for model in models)


def _place(path, x, config: ModelConfig, mesh: Mesh | None) -> jax.Array:
    names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
    sharding = None if mesh is None else NamedSharding(mesh, parameter_spec(names, x.shape, mesh))
    return jax.device_put(x, sharding).astype(_dtype(path, x.dtype, config))


def _dtype(path, dtype, config: ModelConfig):
    return jnp.dtype(config.compute_dtype) if path[-1].key == "kernel" else dtype
