"""Documents of parquet, JSON-lines and plain-text files, local or behind an fsspec URL.

A document is one row of a parquet file, one line of a JSON-lines file, or one whole text file.
`resolve_inputs` turns what the user named into a sorted list of files; `read_documents` iterates the texts of
one of them.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from fsspec.core import has_magic, url_to_fs

from orthros_jax.errors import UserError

JSON_SUFFIXES = frozenset({".jsonl", ".json", ".ndjson"})
TEXT_SUFFIXES = frozenset(
    {".txt", ".text", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cc", ".cpp", ".java", ".js", ".ts"}
    | {".go", ".rs", ".sh", ".sql"}
)
COMPRESSION_SUFFIXES = frozenset({".gz", ".zst"})
KNOWN_SUFFIXES = (
    "readable are .parquet, JSON lines (.jsonl, .json, .ndjson) and text (.txt, .md, .py, ...), "
    "the latter two also with .gz or .zst"
)
PROTOCOL_PACKAGES = {
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "s3": "s3fs",
    "s3a": "s3fs",
    "hf": "huggingface_hub",
    "abfs": "adlfs",
    "az": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
}
VERSION_KEYS = ("ETag", "etag", "blob_id", "mtime", "LastModified", "last_modified", "updated", "created")
CHUNK_BYTES = 1 << 20
PARQUET_SLICE_ROWS = 4096


class CorruptFileError(UserError):
    """A file that is truncated or damaged, as opposed to one that was never meant to be read."""


@dataclass(frozen=True)
class InputFile:
    """A file to read.

    Attributes:
      path: absolute local path, or URL.
      size: bytes as stored.
      version: modification time or ETag as text, "" where the file system has neither.
      split: split that all its documents belong to, or None to draw it per document.
    """

    path: str
    size: int
    version: str
    split: str | None = None


def file_kind(path: str) -> str | None:
    """Returns "parquet", "jsonl", "text", or None for a suffix that is not known."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
    if suffixes and suffixes[-1] == ".parquet":
        return "parquet"
    if suffixes and suffixes[-1] in COMPRESSION_SUFFIXES:
        suffixes.pop()
    if suffixes and suffixes[-1] in JSON_SUFFIXES:
        return "jsonl"
    if suffixes and suffixes[-1] in TEXT_SUFFIXES:
        return "text"
    return None


def resolve_inputs(inputs: list[str]) -> list[InputFile]:
    """Expands files, folders, globs and URLs into files, each once, sorted by path.

    A folder stands for its files with a known suffix, at any depth. Folders and globs leave hidden files out.

    Raises:
      UserError: no name, nothing there, nothing matched, an unknown suffix, or a package missing for the protocol.
    """
    files = {file.path: file for item in inputs for file in _expand(item)}
    return [files[path] for path in sorted(files)]


def _expand(item: str) -> list[InputFile]:
    if not item:
        raise UserError("an input has no name, as from an empty shell variable; name files, folders, globs or URLs")
    fs, root = _filesystem(item)
    try:
        if fs.isfile(root):
            found, named = {root: fs.info(root)}, True
        elif fs.isdir(root):
            found, named = fs.find(root, detail=True), False
        elif has_magic(root):
            found, named = fs.glob(root, detail=True), True
        else:
            raise UserError(f"{item}: no such file or folder")
    except (OSError, ImportError) as error:
        raise UserError(f"{item}: cannot be listed: {error}") from error
    found = {
        path: info
        for path, info in found.items()
        if info["type"] == "file" and not _hidden(path, root) and (named or file_kind(path))
    }
    if not found:
        what = "no file matches this pattern" if named else f"no readable file in this folder; {KNOWN_SUFFIXES}"
        raise UserError(f"{item}: {what}")
    for path in found:
        if file_kind(path) is None:
            raise UserError(f"{path}: unknown file type; {KNOWN_SUFFIXES}")
    local = "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)
    return [
        InputFile(path if local else fs.unstrip_protocol(path), info["size"] or 0, _version(info))
        for path, info in found.items()
    ]


def _hidden(path: str, root: str) -> bool:
    given = PurePosixPath(root).parts
    return any(part.startswith(".") for part in PurePosixPath(path).parts if part not in given)


def _version(info: dict[str, Any]) -> str:
    return next((str(info[key]) for key in VERSION_KEYS if info.get(key) is not None), "")


def _filesystem(path: str) -> tuple[Any, str]:
    protocol = path.split("://")[0] if "://" in path else "file"
    try:
        return url_to_fs(path)
    except ImportError as error:
        package = PROTOCOL_PACKAGES.get(protocol)
        fix = f"needs the package {package}: pip install {package}" if package else str(error)
        raise UserError(f"{path}: reading {protocol}:// {fix}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def read_documents(path: str, text_field: str) -> Iterator[str | None]:
    """Iterates the texts of one file in order; None stands for a null.

    Args:
      path: local path or URL with a known suffix.
      text_field: parquet column or JSON key that holds the text; plain text has none.

    Raises:
      UserError: the file cannot be opened, has no such field, or holds something other than text in it.
      CorruptFileError: truncated or damaged data, with the row or line where it was noticed.
    """
    fs, root = _filesystem(path)
    try:
        raw = fs.open(root, "rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be opened: {error}") from error
    with raw:
        kind = file_kind(path)
        if kind == "parquet":
            yield from _parquet_documents(path, raw, text_field)
        elif kind == "jsonl":
            yield from _jsonl_documents(path, _decompressed(path, raw), text_field)
        else:
            yield _text_document(path, _decompressed(path, raw))


def _parquet_documents(path: str, raw: BinaryIO, text_field: str) -> Iterator[str | None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        # Only the text column is touched, so shards may disagree about every other one.
        parquet = pq.ParquetFile(raw, pre_buffer=True, page_checksum_verification=True)
        _check_text_column(path, parquet.schema_arrow, text_field)
        for group in range(parquet.num_row_groups):
            column = parquet.read_row_group(group, columns=[text_field]).column(0).cast(pa.large_string())
            for start in range(0, len(column), PARQUET_SLICE_ROWS):
                values = column.slice(start, PARQUET_SLICE_ROWS)
                try:
                    yield from values.to_pylist()
                except UnicodeDecodeError:
                    bad = next(i for i, value in enumerate(values) if not _decodes(value))
                    raise CorruptFileError(f"{path}: row {row + bad} is not UTF-8 text") from None
                row += len(values)
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(
            f"{path}: truncated or damaged parquet file, after row {row}: {error}; "
            "fetch it again, or leave such files out with --skip_corrupt"
        ) from error


def _check_text_column(path: str, schema: Any, text_field: str) -> None:
    import pyarrow as pa

    if text_field not in schema.names:
        raise UserError(
            f"{path}: no column {text_field!r}, only {', '.join(schema.names)}; name the text with --text_field"
        )
    kind = schema.field(text_field).type
    value_kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (
        pa.types.is_string(value_kind)
        or pa.types.is_large_string(value_kind)
        or pa.types.is_string_view(value_kind)
        or pa.types.is_null(value_kind)
    ):
        raise UserError(f"{path}: column {text_field!r} holds {kind}, not text; name the text with --text_field")


def _decodes(value: Any) -> bool:
    try:
        value.as_py()
    except UnicodeDecodeError:
        return False
    return True


def _jsonl_documents(path: str, stream: BinaryIO, text_field: str) -> Iterator[str | None]:
    for number, line in enumerate(_lines(path, stream), 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise CorruptFileError(f"{path}: line {number} is not UTF-8 text: {error.reason}") from None
        except (ValueError, RecursionError) as error:
            raise CorruptFileError(f"{path}: line {number} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise UserError(f"{path}: line {number} holds a {type(record).__name__}, not a JSON object")
        if text_field not in record:
            raise UserError(
                f"{path}: line {number} has no key {text_field!r}, only {', '.join(record)}; "
                "name the text with --text_field"
            )
        value = record[text_field]
        if value is not None and not isinstance(value, str):
            raise UserError(f"{path}: line {number}: {text_field!r} is a {type(value).__name__}, not text")
        yield value


def _text_document(path: str, stream: BinaryIO) -> str:
    content = b"".join(_lines(path, stream))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{path}: byte {error.start} is not UTF-8 text: {error.reason}") from None


def _lines(path: str, stream: BinaryIO) -> Iterator[bytes]:
    import zlib

    import zstandard

    number = 0
    try:
        for line in stream:
            yield line
            number += 1
    except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
        raise CorruptFileError(
            f"{path}: truncated or damaged after line {number}: {error}; "
            "fetch it again, or leave such files out with --skip_corrupt"
        ) from error


def _decompressed(path: str, raw: BinaryIO) -> BinaryIO:
    if path.lower().endswith(".gz"):
        import gzip

        return gzip.open(raw)  # pyright: ignore[reportReturnType]
    if path.lower().endswith(".zst"):
        return io.BufferedReader(_ChunkStream(_zstd_chunks(raw)), CHUNK_BYTES)
    return raw


def _zstd_chunks(raw: BinaryIO) -> Iterator[bytes]:
    """Decompresses frame after frame; unlike zstandard's own reader, notices one that stops half-way."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    while chunk := raw.read(CHUNK_BYTES):
        while chunk:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(chunk)
            chunk = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the compressed data ends in the middle of a frame")


class _ChunkStream(io.RawIOBase):
    """An iterator of byte strings as a readable stream."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size
