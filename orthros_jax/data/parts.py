"""One unit of preparation: the documents of a large file, or of a run of small ones, become a shard a split.

A part is a pure function of its input files and the settings, and its record is written after its shards. So
parts can be made in any order, by any number of processes, and again after an interruption, and give the same
bytes.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orthros_jax.data.readers import CorruptFileError, InputFile, file_kind, read_documents
from orthros_jax.data.storage import OFFSET_DTYPE, SPLITS, atomic_writer, read_json, write_json
from orthros_jax.data.tokenizer import Tokenizer, clean_text

PART_BYTES = 16 << 20
# What one call of the tokenizer gets: enough to occupy its threads, little enough to stay small in memory.
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 1024
RECORD_PATTERN = "part-*.json"
SHARD_PATTERNS = tuple(f"{split}-*.{suffix}" for split in SPLITS for suffix in ("tokens", "offsets"))


@dataclass(frozen=True)
class Settings:
    """Everything besides the input files that determines the bytes of a data set.

    Attributes:
      tokenizer: name of the tokenizer, `byte`, a file's name or `train:SIZE`.
      fingerprint: SHA-256 of the tokenizer, None for one that is still to be trained.
      bos_id: id written before each document, or None.
      eos_id: id written after each document, or None.
      text_field: parquet column or JSON key.
      holdout: share of the documents that is held out.
      skip_corrupt: leave a damaged file at the point of damage instead of stopping.
    """

    tokenizer: str
    fingerprint: str | None
    bos_id: int | None
    eos_id: int | None
    text_field: str
    holdout: float
    skip_corrupt: bool


def group_files(files: list[InputFile]) -> list[list[InputFile]]:
    """Cuts the list into parts: a parquet or JSON-lines file each, text files in runs of about 16 MiB."""
    parts, size = [], 0
    for file in files:
        small = file_kind(file.path) == "text"
        if not (small and parts and size and size + file.size <= PART_BYTES):
            parts.append([])
            size = 0
        parts[-1].append(file)
        size = size + max(file.size, 1) if small else 0
    return parts


def token_dtype(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def draw_split(utf8: bytes, holdout: float) -> str:
    """Draws a document's split from its text alone, so that equal documents share it wherever they occur."""
    drawn = int.from_bytes(hashlib.blake2b(utf8, digest_size=8).digest())
    return "heldout" if drawn < holdout * 2**64 else "train"


def read_texts(files: Iterable[InputFile], settings: Settings, skipped: Counter[str]) -> Iterator[tuple[str, str, int]]:
    """Iterates (split, text, bytes of UTF-8) of each document with text; counts the others by reason."""
    for file in files:
        try:
            for text in read_documents(file.path, settings.text_field):
                if text is None or not text or text.isspace():
                    skipped["null" if text is None else "whitespace" if text else "empty"] += 1
                    continue
                text = clean_text(text)
                utf8 = text.encode()
                yield file.split or draw_split(utf8, settings.holdout), text, len(utf8)
        except CorruptFileError:
            if not settings.skip_corrupt:
                raise
            skipped["corrupt_file"] += 1


def write_part(
    number: int,
    files: list[InputFile],
    settings: Settings,
    tokenizer: Tokenizer,
    output: Path,
    on_tokens: Callable[[int], None],
) -> None:
    """Writes the shards of one part and then its record, which marks it as done.

    Args:
      number: position of the part in the data set.
      files: input files in order.
      settings: how to read and split.
      tokenizer: encodes the text.
      output: folder of the data set.
      on_tokens: told the number of tokens after each batch.
    """
    skipped: Counter[str] = Counter()
    names = {split: f"{split}-{number:05d}" for split in SPLITS}
    totals = {split: {"name": names[split], "tokens": 0, "documents": 0, "text_bytes": 0} for split in SPLITS}
    dtype = token_dtype(tokenizer.vocab_size)
    with ExitStack() as stack:
        streams: dict[str, Any] = {}
        for batch in _batches(read_texts(files, settings, skipped)):
            encoded = tokenizer.encode_batch([text for _, text, _ in batch])
            for split in SPLITS:
                chosen = [i for i, document in enumerate(batch) if document[0] == split and len(encoded[i])]
                if not chosen:
                    continue
                if split not in streams:
                    streams[split] = [
                        stack.enter_context(atomic_writer(output / f"{names[split]}.{suffix}"))
                        for suffix in ("tokens", "offsets")
                    ]
                total = totals[split]
                lengths, tokens = _frame([encoded[i] for i in chosen], settings, dtype)
                streams[split][0].write(tokens.tobytes())
                streams[split][1].write((total["tokens"] + np.cumsum(lengths)).astype(OFFSET_DTYPE).tobytes())
                total["tokens"] += len(tokens)
                total["documents"] += len(chosen)
                total["text_bytes"] += sum(batch[i][2] for i in chosen)
                on_tokens(len(tokens))
            skipped["no_tokens"] += sum(not len(ids) for ids in encoded)
    write_json(_record_path(output, number), {"skipped": +skipped, "splits": totals})


def _batches(documents: Iterator[tuple[str, str, int]]) -> Iterator[list[tuple[str, str, int]]]:
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document[1])
        if characters >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _frame(documents: list[np.ndarray], settings: Settings, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the length of each document with its BOS and EOS, and all their tokens in a row."""
    bos = np.asarray([] if settings.bos_id is None else [settings.bos_id], dtype)
    eos = np.asarray([] if settings.eos_id is None else [settings.eos_id], dtype)
    lengths = np.asarray([len(ids) for ids in documents], np.int64) + len(bos) + len(eos)
    pieces = [piece for ids in documents for piece in (bos, ids, eos)]
    return lengths, np.concatenate(pieces).astype(dtype)


def _record_path(output: Path, number: int) -> Path:
    return output / f"part-{number:05d}.json"


def part_done(output: Path, number: int) -> bool:
    return _record_path(output, number).exists()


def read_part(output: Path, number: int) -> dict[str, Any]:
    """Returns {"skipped": {reason: count}, "splits": {split: {name, tokens, documents, text_bytes}}}."""
    return read_json(_record_path(output, number))


def any_record(output: Path) -> bool:
    return any(output.glob(RECORD_PATTERN))


def delete_records(output: Path) -> None:
    for path in output.glob(RECORD_PATTERN):
        path.unlink()
