"""The one table of tensor names, which import and export both follow.

A matrix is [out, in] in PyTorch and [*in_axes, *out_axes] here. Layers 0 to L - 2 lie in stacks, [L - 1, ...]; layer
L - 1 is stored by itself and has no parameters for queries of the context stream.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from orthros_jax.config import ModelConfig
from orthros_jax.model import build_model

Path = tuple[str, ...]


class Row(NamedTuple):
    """One kind of tensor.

    Attributes:
      name: name in the file, behind `model.layers.N.` for a layer's.
      path: path of the parameter, within its layer for a layer's.
      in_axes: axes of the parameter that a matrix contracts; 0 where both sides hold the same array.
      identity: value that changes nothing, for parameters that only Orthros has; None where there is none.
    """

    name: str
    path: Path
    in_axes: int
    identity: float | None = None


MODEL_ROWS = (
    Row("model.embed_tokens.weight", ("embedding", "kernel"), 0),
    Row("model.norm.weight", ("final_norm", "scale"), 0),
    Row("lm_head.weight", ("head", "kernel"), 1),
)
LAYER_ROWS = (
    Row("input_layernorm.weight", ("attention_norm", "scale"), 0),
    Row("self_attn.q_proj.weight", ("attention", "query", "kernel"), 1),
    Row("self_attn.q_proj_context.weight", ("attention", "query_context", "kernel"), 1),
    Row("self_attn.q_proj_output.weight", ("attention", "query_output", "kernel"), 1),
    Row("self_attn.scale_offset_context.scale", ("attention", "scale_offset_context", "gamma"), 0, 1.0),
    Row("self_attn.scale_offset_context.offset", ("attention", "scale_offset_context", "beta"), 0, 0.0),
    Row("self_attn.scale_offset_output.scale", ("attention", "scale_offset_output", "gamma"), 0, 1.0),
    Row("self_attn.scale_offset_output.offset", ("attention", "scale_offset_output", "beta"), 0, 0.0),
    Row("self_attn.k_proj.weight", ("attention", "key", "kernel"), 1),
    Row("self_attn.v_proj.weight", ("attention", "value", "kernel"), 1),
    Row("self_attn.o_proj.weight", ("attention", "output", "kernel"), 2),
    Row("self_attn.q_norm.weight", ("attention", "query_norm", "scale"), 0),
    Row("self_attn.k_norm.weight", ("attention", "key_norm", "scale"), 0),
    Row("post_attention_layernorm.weight", ("ffn_norm", "scale"), 0),
    Row("mlp.gate_proj.weight", ("ffn", "gate", "kernel"), 1),
    Row("mlp.up_proj.weight", ("ffn", "up", "kernel"), 1),
    Row("mlp.down_proj.weight", ("ffn", "down", "kernel"), 1),
)


class Entry(NamedTuple):
    """One tensor of a file and the parameter that it is, or is one layer of.

    Attributes:
      name: full name in the file.
      path: path of the parameter in the training layout.
      layer: index along the parameter's leading axis, None for one that is not stacked.
      shape: shape of the parameter, without that axis.
      in_axes, identity: as in `Row`.
    """

    name: str
    path: Path
    layer: int | None
    shape: tuple[int, ...]
    in_axes: int
    identity: float | None

    @property
    def file_shape(self) -> tuple[int, ...]:
        if not self.in_axes:
            return self.shape
        return math.prod(self.shape[self.in_axes :]), math.prod(self.shape[: self.in_axes])

    def to_parameter(self, tensor: np.ndarray) -> np.ndarray:
        """A view of the file's tensor in the parameter's shape, where NumPy can make one."""
        return tensor.T.reshape(self.shape) if self.in_axes else tensor

    def to_file(self, parameter: np.ndarray) -> np.ndarray:
        """The inverse of `to_parameter`."""
        if not self.in_axes:
            return parameter
        return parameter.reshape(math.prod(self.shape[: self.in_axes]), -1).T


def parameter_shapes(config: ModelConfig) -> dict[Path, jax.ShapeDtypeStruct]:
    """Path, shape and type of every parameter."""
    state = nnx.state(nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0))), nnx.Param)
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))
    return {tuple(key.key for key in path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves}


def entries(config: ModelConfig) -> list[Entry]:
    """All tensors of a model in the order of its layers, each parameter covered exactly once."""
    shapes = parameter_shapes(config)
    found = [*_of_model(shapes), *_of_layers(shapes, config.num_layers)]
    if missing := set(shapes) - {entry.path for entry in found}:
        raise KeyError(f"no tensor name for {sorted(missing)}")
    return found


def _of_model(shapes: dict) -> Iterator[Entry]:
    for name, path, in_axes, identity in MODEL_ROWS:
        if path in shapes:
            yield Entry(name, path, None, shapes[path].shape, in_axes, identity)


def _of_layers(shapes: dict, num_layers: int) -> Iterator[Entry]:
    for layer in range(num_layers):
        is_last = layer == num_layers - 1
        for name, path, in_axes, identity in LAYER_ROWS:
            full_path = ("last_layer" if is_last else "layers", *path)
            if full_path in shapes:
                shape = shapes[full_path].shape
                index, shape = (None, shape) if is_last else (layer, shape[1:])
                yield Entry(f"model.layers.{layer}.{name}", full_path, index, shape, in_axes, identity)


def nested(flat: dict[Path, Any]) -> dict:
    """{("a", "b"): x} to {"a": {"b": x}}, the form of `TrainState.params`."""
    tree: dict = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def flattened(tree: dict) -> dict[Path, Any]:
    """The inverse of `nested`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {tuple(key.key for key in path): leaf for path, leaf in leaves}
