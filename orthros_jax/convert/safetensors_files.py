"""Safetensors files, read and written one tensor at a time.

A file is eight bytes with the length of its header, little-endian; the header, a JSON object from tensor names to type,
shape and byte range; and the bytes of the tensors. The `safetensors` library writes a file from tensors that are all
in memory, and reads by mapping it; here no more than one tensor is held beside the model.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from orthros_jax.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_HEADER_LIMIT = 100 << 20
_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Stored(NamedTuple):
    """Where a tensor lies: its file, type, shape and first byte."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int


def find_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a model folder, with one file or with shards and an index.

    Raises:
      UserError: no safetensors file, a shard of the index that is missing, a damaged header, a tensor in two files, or
        an index and shards that disagree.
    """
    index_path = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file():
        if index_path.is_file():
            raise UserError(f"{folder}: holds both {SINGLE_FILE} and {INDEX_FILE}; delete the one that is left over")
        return read_header(folder / SINGLE_FILE)
    if not index_path.is_file():
        hint = ""
        if any(folder.glob("*.bin")):
            hint = "; convert the .bin files with `save_pretrained` of transformers"
        raise UserError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} here{hint}")
    weight_map = _read_index(index_path)
    tensors: dict[str, Stored] = {}
    for shard in sorted(set(weight_map.values())):
        path = folder / shard
        if not path.is_file():
            raise UserError(f"{path}: missing, though {INDEX_FILE} names it; download it again")
        for name, stored in read_header(path).items():
            if weight_map.get(name) != shard:
                where = f"in {weight_map[name]}" if name in weight_map else "nowhere"
                raise UserError(f"{path}: holds {name}, which {INDEX_FILE} places {where}; download the folder again")
            tensors[name] = stored
    if absent := sorted(set(weight_map) - set(tensors)):
        raise UserError(
            f"{folder / weight_map[absent[0]]}: lacks {absent[0]}, which {INDEX_FILE} places there; download it again"
        )
    return tensors


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file.

    Raises:
      UserError: the header is damaged, does not fit the file's size, or has a type that is not a floating-point one.
    """

    def damaged(reason: str) -> UserError:
        return UserError(f"{path}: damaged safetensors file: {reason}; download it again")

    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise damaged("the header is longer than the file")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        described = {name: _describe(tensor) for name, tensor in header.items()}
    except (ValueError, AttributeError, KeyError, TypeError):
        raise damaged("the header cannot be read") from None
    tensors, end = {}, 0
    for name, (dtype_name, shape, start, stop) in sorted(described.items(), key=lambda item: item[1][2]):
        if dtype_name not in _DTYPES:
            raise UserError(f"{path}: {name} has type {dtype_name}; only {', '.join(_DTYPES)} are supported")
        dtype = _DTYPES[dtype_name]
        if start != end or stop - start != math.prod(shape) * dtype.itemsize:
            raise damaged(f"the bytes of {name} do not fit its shape")
        tensors[name] = Stored(path, dtype, shape, 8 + length + start)
        end = stop
    if 8 + length + end != size:
        raise damaged(f"it has {size} bytes, its header asks for {8 + length + end}")
    return tensors


def numpy_dtype(name: str) -> np.dtype:
    """`bfloat16` or `float32` as a type of NumPy."""
    return np.dtype(getattr(ml_dtypes, name, name))


def read_tensor(stored: Stored) -> np.ndarray:
    """Reads one tensor."""
    return np.fromfile(stored.file, stored.dtype, math.prod(stored.shape), offset=stored.start).reshape(stored.shape)


class Output(NamedTuple):
    """A tensor to write: name, type, shape, and a function that makes it when its turn has come."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(folder: Path, outputs: Sequence[Output], shard_bytes: int) -> None:
    """Writes one file, or shards of at most `shard_bytes` (or of one tensor) and their index, into an empty folder."""
    shards = _into_shards(outputs, shard_bytes)
    if len(shards) == 1:
        _write_file(folder / SINGLE_FILE, shards[0])
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, shard)
        weight_map |= {output.name: file for output in shard}
    index = {"metadata": {"total_size": sum(output.nbytes for output in outputs)}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _into_shards(outputs: Iterable[Output], shard_bytes: int) -> list[list[Output]]:
    shards: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        if shards[-1] and size + output.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += output.nbytes
    return shards


def _write_file(path: Path, outputs: Sequence[Output]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for output in outputs:
        start, end = end, end + output.nbytes
        header[output.name] = {
            "dtype": _NAMES[output.dtype],
            "shape": list(output.shape),
            "data_offsets": [start, end],
        }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # so that the tensors are aligned
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for output in outputs:
            _write_array(stream, output)


def _write_array(stream: BinaryIO, output: Output) -> None:
    tensor = np.ascontiguousarray(output.make(), dtype=output.dtype)
    if tensor.shape != output.shape:
        raise ValueError(f"{output.name} is {tensor.shape}, announced as {output.shape}")
    stream.write(tensor.reshape(-1).view(np.uint8).data)


def _describe(tensor: dict) -> tuple[str, tuple[int, ...], int, int]:
    start, stop = tensor["data_offsets"]
    shape = tuple(tensor["shape"])
    if not all(isinstance(number, int) and number >= 0 for number in (start, stop, *shape)):
        raise ValueError
    return tensor["dtype"], shape, start, stop


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        if not all(isinstance(file, str) and Path(file).name == file for file in weight_map.values()):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: damaged; download it again") from None
    return weight_map
