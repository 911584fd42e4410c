"""A model folder of Hugging Face as settings and parameters of this project, tensor by tensor."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from orthros_jax.config import ModelConfig
from orthros_jax.convert import tensors
from orthros_jax.convert.hf_config import CONFIG_FILE, ORTHROS, ImportKind, read_hf_config, to_model_config
from orthros_jax.convert.safetensors_files import Stored, find_tensors, read_tensor
from orthros_jax.data.kept_tokenizer import require_tokenizer
from orthros_jax.errors import UserError
from orthros_jax.sharding import parameter_spec

# Rotary frequencies that old checkpoints carry along; config.json determines them.
_NO_PARAMETERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
# A buffer that starts at a multiple of this becomes an array of the CPU without a copy.
_ALIGNMENT = 64


def load_hf(
    folder: Path | str,
    kind: ImportKind | None = None,
    dtype: str = "float32",
    sharding: Callable[[tuple[str, ...], tuple[int, ...]], jax.sharding.Sharding] | Mesh | None = None,
) -> tuple[ModelConfig, dict, Path]:
    """Opens a model folder of Llama, Qwen3 or an exported Orthros.

    At most the model in its target type and one tensor of the file are in this host's memory at once. Devices get
    their own parts alone.

    Args:
      folder: holds config.json, safetensors files and tokenizer.json.
      kind: what to make of a Llama or Qwen3: `orthros` (None means that too), which has its weights and an identity
        for scale and offset, or the original `transformer`.
      dtype: type of the parameters, `float32` or `bfloat16`.
      sharding: a mesh, whose parameters are laid out as in training; a function from path and rank of a parameter to
        its sharding; or None for the default device.

    Returns:
      The settings; the parameters as in `TrainState.params`, a nested dictionary of arrays; the path of tokenizer.json.

    Raises:
      UserError: whatever is wrong with the folder, by file and entry.
    """
    folder = Path(folder)
    document = read_hf_config(folder)
    config = to_model_config(document, str(folder / CONFIG_FILE), kind, param_dtype=dtype)
    tokenizer = require_tokenizer(folder)
    return config, read_parameters(folder, config, _placement(sharding), document["model_type"] == ORTHROS), tokenizer


def read_parameters(folder: Path, config: ModelConfig, placement, is_orthros: bool) -> dict:
    """The parameters of `config` from the safetensors files of a folder.

    Args:
      placement: path and shape of a parameter to its sharding.
      is_orthros: the folder holds an Orthros model, so that scale and offset are in its files.

    Raises:
      UserError: a tensor is missing, left over, or has another shape.
    """
    stored = find_tensors(folder)
    entries = tensors.entries(config)
    sources = _match(folder, entries, stored, config, is_orthros)
    shapes = tensors.parameter_shapes(config)
    by_path: dict[tensors.Path, list[tensors.Entry]] = {}
    for entry in entries:
        by_path.setdefault(entry.path, []).append(entry)
    parameters = {
        path: _assemble(shapes[path], placement(path, shapes[path].shape), of_path, sources)
        for path, of_path in by_path.items()
    }
    return tensors.nested(parameters)


def _placement(sharding) -> Callable[[tuple[str, ...], tuple[int, ...]], jax.sharding.Sharding]:
    if isinstance(sharding, Mesh):
        return lambda path, shape: NamedSharding(sharding, parameter_spec(path, shape, sharding))
    if sharding is not None:
        return sharding
    device = SingleDeviceSharding(jax.local_devices()[0])
    return lambda path, shape: device


def _match(
    folder: Path, entries: list[tensors.Entry], stored: dict[str, Stored], config: ModelConfig, is_orthros: bool
) -> dict[str, Stored | None]:
    """Where each entry's tensor lies; None for an identity that the file does not have."""
    sources: dict[str, Stored | None] = {}
    for entry in entries:
        found = stored.get(entry.name)
        if found is None and (entry.identity is None or is_orthros):
            raise UserError(f"{folder}: tensor {entry.name} is missing; download the folder again")
        if found is not None and found.shape != entry.file_shape:
            raise UserError(
                f"{found.file}: {entry.name} has shape {list(found.shape)}, but {CONFIG_FILE} asks for "
                f"{list(entry.file_shape)}; both must come from the same model"
            )
        sources[entry.name] = found
    left_over = {name for name in stored if name not in sources and not _NO_PARAMETERS.fullmatch(name)}
    if config.tie_embeddings and "lm_head.weight" in left_over:
        left_over.remove("lm_head.weight")
        _check_tied(stored)
    if left_over:
        name = min(left_over)
        raise UserError(f"{stored[name].file}: unexpected tensor {name}: {CONFIG_FILE} describes a model without it")
    return sources


def _check_tied(stored: dict[str, Stored]) -> None:
    head, embedding = stored["lm_head.weight"], stored["model.embed_tokens.weight"]
    if head.shape != embedding.shape or not np.array_equal(read_tensor(head), read_tensor(embedding)):
        raise UserError(
            f"{head.file}: lm_head.weight differs from the embedding, though {CONFIG_FILE} says "
            "tie_word_embeddings true; set it to false"
        )


def _assemble(
    shape: jax.ShapeDtypeStruct,
    sharding: jax.sharding.Sharding,
    entries: list[tensors.Entry],
    sources: dict[str, Stored | None],
) -> jax.Array:
    """One parameter: each tensor is read once and its parts copied to where this host's devices need them."""
    indices = sharding.addressable_devices_indices_map(shape.shape)
    buffers: dict[str, tuple[Any, np.ndarray]] = {}
    for index in indices.values():
        part = tuple(range(*axis.indices(size)) for axis, size in zip(index or (), shape.shape, strict=True))
        if str(index) not in buffers:
            buffers[str(index)] = index, _aligned_empty(tuple(map(len, part)), np.dtype(shape.dtype))
    for entry in entries:
        source = sources[entry.name]
        if source is None:
            parameter = np.broadcast_to(np.float32(entry.identity or 0), entry.shape)
        else:
            parameter = entry.to_parameter(read_tensor(source))
        for index, buffer in buffers.values():
            if entry.layer is None:
                buffer[...] = parameter[index]
            else:
                # Stacks are never cut along their layers.
                buffer[entry.layer] = parameter[index[1:]]
    arrays = [jax.device_put(buffers[str(index)][1], device) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, arrays)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
