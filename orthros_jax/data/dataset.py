"""Random access to the windows of a prepared data set, straight from its files.

Nothing is kept that grows with the data set: no offsets, and no mapping, whose pages would count as memory of the
process once they are read.
"""

import bisect
import functools
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np

from orthros_jax.data.storage import FORMAT, INDEX_FILE, MANIFEST_FILE, OFFSET_DTYPE, VERSION, read_json
from orthros_jax.data.tokenizer import TOKENIZER_FILE, ByteTokenizer, FileTokenizer, Tokenizer
from orthros_jax.errors import UserError

# A shard in use keeps two file descriptors; processes are commonly allowed 1024 of them.
OPEN_SHARDS = 64
# Offsets are read in blocks of a page.
_BLOCK = 4096 // np.dtype(OFFSET_DTYPE).itemsize
# Searching for a document looks at the first offset of blocks again and again; these many are remembered.
_REMEMBERED_OFFSETS = 2**17


def read_index(path: Path | str) -> dict[str, Any]:
    """Reads the index of a finished data set.

    Raises:
      UserError: no such folder, an unfinished one, or one of another format version.
    """
    path = Path(path)
    if not (path / INDEX_FILE).is_file():
        if (path / MANIFEST_FILE).is_file():
            raise UserError(
                f"{path}: this data set is unfinished; run its `python -m orthros_jax prepare` command again"
            )
        raise UserError(
            f"{path}: no prepared data set here; make it with "
            f"`python -m orthros_jax prepare --input FILES --output {path}`"
        )
    index = read_json(path / INDEX_FILE)
    found = (index.get("format"), index.get("version"))
    if found != (FORMAT, VERSION):
        raise UserError(
            f"{path / INDEX_FILE}: format {found[0]} version {found[1]}, but this program reads {FORMAT} "
            f"version {VERSION}; prepare the data set again"
        )
    return index


def dataset_tokenizer(path: Path | str) -> Tokenizer:
    """Opens the tokenizer that a data set was made with."""
    described = read_index(path)["tokenizer"]
    if described["fingerprint"] == ByteTokenizer.fingerprint:
        return ByteTokenizer()
    file = Path(path) / TOKENIZER_FILE
    if not file.is_file():
        raise UserError(f"{file}: missing; copy the tokenizer.json that the data set was made with back to this place")
    tokenizer = FileTokenizer(file.read_bytes(), described["name"], described["bos_id"], described["eos_id"])
    if tokenizer.fingerprint != described["fingerprint"]:
        raise UserError(f"{file}: not the tokenizer that the data set was made with; put the original back")
    return tokenizer


class TokenDataset:
    """Windows of T + 1 tokens with stride T over a split: consecutive windows share one token.

    The split is one stream of N tokens, document after document. Window w holds tokens w T to w T + T, so
    each token but the stream's first is the label of its predecessor in exactly one window. There are
    ceil((N - 1) / T) windows; the last one is padded. Segment ids count the documents of a window from 1;
    padding has token 0 and segment id 0.

    Attributes:
      tokens: number of tokens N.
      documents: number of documents.
      text_bytes: UTF-8 bytes of their text.
      vocab_size: ids are below this.
      tokenizer_name: for messages.
      fingerprint: SHA-256 of the tokenizer.

    Raises:
      UserError: as `read_index`, or a shard whose size is not what the index says.
    """

    def __init__(self, path: Path | str, split: str, sequence_length: int):
        index = read_index(path)
        described = index["splits"][split]
        self.path = Path(path)
        self.sequence_length = sequence_length
        self.tokens: int = described["tokens"]
        self.documents: int = described["documents"]
        self.text_bytes: int = described["text_bytes"]
        self.vocab_size: int = index["tokenizer"]["vocab_size"]
        self.tokenizer_name: str = index["tokenizer"]["name"]
        self.fingerprint: str = index["tokenizer"]["fingerprint"]
        self._dtype = np.dtype(index["dtype"])
        self._shards = described["shards"]
        # First token of each shard within the split, and the end of the last.
        self._starts = [0, *itertools.accumulate(shard["tokens"] for shard in self._shards)]
        self._check_sizes()
        self._opened = functools.lru_cache(maxsize=OPEN_SHARDS)(self._open)
        self._first_end = functools.lru_cache(maxsize=_REMEMBERED_OFFSETS)(self._read_first_end)

    def __len__(self) -> int:
        return max(0, -(-(self.tokens - 1) // self.sequence_length))

    def __getitem__(self, window: int) -> dict[str, np.ndarray]:
        """Returns {"tokens": [T + 1] int32, "segment_ids": [T + 1] int32}."""
        rows = self.sequence_length + 1
        tokens, segment_ids = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        self.read(window, tokens, segment_ids)
        return {"tokens": tokens, "segment_ids": segment_ids}

    def read(self, window: int, tokens: np.ndarray, segment_ids: np.ndarray) -> None:
        """Copies a window into two arrays of zeros, [T + 1] int32 each."""
        if not 0 <= window < len(self):
            raise IndexError(f"window {window} of {len(self)}")
        start = window * self.sequence_length
        stop = min(start + self.sequence_length + 1, self.tokens)
        shard = bisect.bisect_right(self._starts, start) - 1
        row, segments = 0, 0
        while start < stop:
            local = start - self._starts[shard]
            size = min(stop - start, self._shards[shard]["tokens"] - local)
            ids, _ = self._opened(shard)
            tokens[row : row + size] = ids.read(local, size)
            bounds = [0, *(end - local for end in self._ends_within(shard, local, local + size)), size]
            for begin, end in itertools.pairwise(bounds):
                segments += 1
                segment_ids[row + begin : row + end] = segments
            start, row, shard = start + size, row + size, shard + 1

    def _check_sizes(self) -> None:
        for shard in self._shards:
            for suffix, size in (
                ("tokens", shard["tokens"] * self._dtype.itemsize),
                ("offsets", shard["documents"] * np.dtype(OFFSET_DTYPE).itemsize),
            ):
                file = self.path / f"{shard['name']}.{suffix}"
                found = file.stat().st_size if file.is_file() else None
                if found != size:
                    problem = "missing" if found is None else f"{found} bytes, but the index says {size}"
                    raise UserError(f"{file}: {problem}; copy the data set again, or delete it and prepare it again")

    def _open(self, shard: int) -> tuple["_Numbers", "_Numbers"]:
        stem = f"{self.path}/{self._shards[shard]['name']}"
        return _Numbers(f"{stem}.tokens", self._dtype), _Numbers(f"{stem}.offsets", np.dtype(OFFSET_DTYPE))

    def _ends_within(self, shard: int, start: int, stop: int) -> list[int]:
        """The ends of documents strictly between two places of a shard, in ascending order."""
        documents = self._shards[shard]["documents"]
        blocks = -(-documents // _BLOCK)
        block = max(0, bisect.bisect_right(range(blocks), start, key=functools.partial(self._first_end, shard)) - 1)
        found: list[int] = []
        while block < blocks:
            first = block * _BLOCK
            ends = self._opened(shard)[1].read(first, min(_BLOCK, documents - first))
            found += ends[slice(*ends.searchsorted((start + 1, stop)))].tolist()
            if ends[-1] >= stop:
                break
            block += 1
        return found

    def _read_first_end(self, shard: int, block: int) -> int:
        return int(self._opened(shard)[1].read(block * _BLOCK, 1)[0])


class _Numbers:
    """A file of numbers, open to be read anywhere; it is closed with the last reference to this object."""

    def __init__(self, path: str, dtype: np.dtype):
        self._path, self._dtype = path, dtype
        self._descriptor = os.open(path, os.O_RDONLY)

    def __del__(self):
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, first: int, count: int) -> np.ndarray:
        """Reads numbers first to first + count.

        Raises:
          UserError: the file has become shorter since the data set was opened.
        """
        size = self._dtype.itemsize
        found = os.pread(self._descriptor, count * size, first * size)
        if len(found) < count * size:
            raise UserError(f"{self._path}: has become shorter while it is read; copy the data set again")
        return np.frombuffer(found, self._dtype)
