"""Files of every kind, whole and damaged."""

import gzip
import json
import random

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from orthros_jax.data.readers import CorruptFileError, file_kind, read_documents, resolve_inputs
from orthros_jax.errors import UserError

ROWS = ["one", None, "", "two\nlines", "🦊"]


def read(path, field="text"):
    return list(read_documents(str(path), field))


def paths(*inputs):
    return [file.path for file in resolve_inputs([str(item) for item in inputs])]


def write_jsonl(path, rows=ROWS, opener=open):
    with opener(path, "wb") as stream:
        for row in rows:
            stream.write(json.dumps({"id": 1, "text": row}).encode() + b"\n")
    return path


def open_zst(path, mode):
    return zstandard.open(path, mode)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(ROWS),
        pa.array(ROWS, pa.large_string()),
        pa.array(ROWS).dictionary_encode(),
        pa.chunked_array([ROWS[:2], ROWS[2:]]),
    ],
    ids=["string", "large_string", "dictionary", "chunked"],
)
@pytest.mark.parametrize("group_rows", [1, 2, 100])
def test_parquet(column, group_rows, tmp_path):
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=group_rows)
    assert read(tmp_path / "a.parquet") == ROWS


def test_parquet_longer_than_one_slice(tmp_path):
    rows = [str(i) for i in range(10_000)]
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == rows


def test_parquet_shards_with_other_columns(tmp_path):
    """Shards that differ in every other column, one of them unreadable as a table together with the rest."""
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"meta": [{"url": "u", "n": 1}], "text": ["b"]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"text": pa.array(["c"], pa.large_string()), "meta": [7]}), tmp_path / "2.parquet")
    assert [read(path) for path in paths(tmp_path)] == [["a"], ["b"], ["c"]]


def test_only_the_text_column_is_read(tmp_path, monkeypatch):
    asked = []
    original = pq.ParquetFile.read_row_group

    def spy(self, group, columns=None, **rest):
        asked.append(columns)
        return original(self, group, columns=columns, **rest)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    pq.write_table(pa.table({"text": ["a", "b"], "other": [1, 2]}), tmp_path / "a.parquet", row_group_size=1)
    assert read(tmp_path / "a.parquet") == ["a", "b"]
    assert asked == [["text"], ["text"]]


@pytest.mark.parametrize("keep", [0.5, 0.0, 0.99])
def test_truncated_parquet_names_the_file(keep, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [str(i) for i in range(1000)]}), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(CorruptFileError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: truncated or damaged parquet file, after row 0: ")
    assert str(error.value).endswith("; fetch it again, or leave such files out with --skip_corrupt")


def test_parquet_damaged_inside(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [random.Random(i).randbytes(100).hex() for i in range(1000)]
    pq.write_table(pa.table({"text": rows}), path, row_group_size=100, use_dictionary=False, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 2000] = bytes(2000)
    path.write_bytes(content)
    documents = read_documents(str(path), "text")
    with pytest.raises(CorruptFileError, match=r"a\.parquet: truncated or damaged parquet file, after row \d00: "):
        list(documents)


def test_parquet_that_is_not_utf8(tmp_path):
    column = pa.array([b"fine", b"\xff\xfe", b"x"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(CorruptFileError) as error:
        read(tmp_path / "a.parquet")
    assert str(error.value) == f"{tmp_path}/a.parquet: row 1 is not UTF-8 text"


def test_parquet_without_the_column(tmp_path):
    pq.write_table(pa.table({"id": [1], "content": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError) as error:
        read(tmp_path / "a.parquet")
    assert str(error.value) == (
        f"{tmp_path}/a.parquet: no column 'text', only id, content; name the text with --text_field"
    )
    assert read(tmp_path / "a.parquet", "content") == ["a"]


def test_parquet_column_of_another_type(tmp_path):
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(UserError) as error:
        read(tmp_path / "a.parquet")
    assert str(error.value) == (
        f"{tmp_path}/a.parquet: column 'text' holds int64, not text; name the text with --text_field"
    )


@pytest.mark.parametrize(("suffix", "opener"), [("", open), (".gz", gzip.open), (".zst", open_zst)])
def test_jsonl(suffix, opener, tmp_path):
    assert read(write_jsonl(tmp_path / f"a.jsonl{suffix}", opener=opener)) == ROWS


def test_jsonl_with_blank_lines_a_byte_order_mark_and_no_last_newline(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}')
    assert read(tmp_path / "a.json") == ["a", "b"]


def test_jsonl_surrogates(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n{"text": "\\ud800"}\n')
    assert read(tmp_path / "a.jsonl") == ["😀", "\ud800"]


def test_zstandard_of_several_frames(tmp_path):
    frames = [zstandard.compress(json.dumps({"text": row}).encode() + b"\n") for row in ROWS]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert read(tmp_path / "a.jsonl.zst") == ROWS


@pytest.mark.parametrize(("suffix", "opener"), [(".gz", gzip.open), (".zst", open_zst)])
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_truncated_compression(suffix, opener, kind, tmp_path):
    path = write_jsonl(tmp_path / f"a.{kind}{suffix}", [str(i) for i in range(1000)], opener)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorruptFileError, match=r": truncated or damaged after line \d+: .*--skip_corrupt"):
        read(path)


def test_zstandard_cut_between_lines(tmp_path):
    """What is lost here cannot be noticed from the lines."""
    compressor = zstandard.ZstdCompressor().compressobj()
    start = compressor.compress(b'{"text": "a"}\n') + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    (tmp_path / "a.jsonl.zst").write_bytes(start)
    with pytest.raises(CorruptFileError) as error:
        read(tmp_path / "a.jsonl.zst")
    assert str(error.value) == (
        f"{tmp_path}/a.jsonl.zst: truncated or damaged after line 1: the compressed data ends in the middle "
        "of a "
        "frame; fetch it again, or leave such files out with --skip_corrupt"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "b"', "line 2 is not JSON: Expecting ',' delimiter: line 1 column 13 (char 12)"),
        (
            b'{"text": "b", "id": ' + b"[" * 200_000,
            "line 2 is not JSON: maximum recursion depth exceeded while decoding a JSON array from a unicode string",
        ),
        (b'{"text": "\xff"}', "line 2 is not UTF-8 text: invalid start byte"),
        (b'["b"]', "line 2 holds a list, not a JSON object"),
        (
            b'{"id": 1, "body": "b"}',
            "line 2 has no key 'text', only id, body; name the text with --text_field",
        ),
        (b'{"text": 5}', "line 2: 'text' is a int, not text"),
    ],
)
def test_broken_jsonl_lines(line, message, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + line)
    documents = read_documents(str(tmp_path / "a.jsonl"), "text")
    assert next(documents) == "a"
    with pytest.raises(UserError) as error:
        next(documents)
    assert str(error.value) == f"{tmp_path}/a.jsonl: {message}"


def test_text_files(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffline\r\nlínea\n".encode())
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(b"zipped"))
    assert read(tmp_path / "a.txt") == ["line\r\nlínea\n"]
    assert read(tmp_path / "b.md.gz") == ["zipped"]


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(CorruptFileError) as error:
        read(tmp_path / "a.txt")
    assert str(error.value) == f"{tmp_path}/a.txt: byte 3 is not UTF-8 text: invalid continuation byte"


def test_kinds():
    kinds = {name: file_kind(name) for name in ("x/a.PARQUET", "a.b.jsonl.zst", "a.txt.gz", "a.gz", "a.bin", "README")}
    assert list(kinds.values()) == ["parquet", "jsonl", "text", None, None, None]


def test_folders_globs_and_files_give_each_file_once_in_order(tmp_path):
    for name in ("b.txt", "sub/a.jsonl", "sub/.hidden/c.txt", "sub/image.png", ".d.txt", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    everything = [f"{tmp_path}/{name}" for name in ("a.txt", "b.txt", "sub/a.jsonl")]
    assert paths(tmp_path) == everything
    assert paths(tmp_path / "b.txt", tmp_path, tmp_path / "*.txt") == everything
    assert paths(tmp_path / "**" / "*.jsonl") == everything[2:]
    assert paths(f"file://{tmp_path}/a.txt") == everything[:1]


def test_a_file_with_brackets_in_its_name(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert paths(tmp_path / "a[1].txt") == [f"{tmp_path}/a[1].txt"]


def test_relative_paths(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert paths("a.txt", "./a.txt", "*.txt") == [f"{tmp_path}/a.txt"]


def test_size_and_version_tell_files_apart(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (before,) = resolve_inputs([str(tmp_path)])
    (tmp_path / "a.txt").write_text("xy")
    (after,) = resolve_inputs([str(tmp_path)])
    assert (before.size, after.size) == (1, 2)
    assert before.version != after.version


def test_urls():
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/b.jsonl", b'{"text": "b"}\n')
    memory.pipe("/corpus/a.txt", b"a")
    try:
        found = paths("memory://corpus")
        assert found == ["memory:///corpus/a.txt", "memory:///corpus/b.jsonl"]
        assert [read(path) for path in found] == [["a"], ["b"]]
        assert paths("memory://corpus/*.jsonl") == found[1:]
    finally:
        memory.rm("/corpus", recursive=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.txt", "no such file or folder"),
        ("*.txt", "no file matches this pattern"),
        (
            "empty",
            "no readable file in this folder; readable are .parquet, JSON lines (.jsonl, .json, .ndjson) and "
            "text "
            "(.txt, .md, .py, ...), the latter two also with .gz or .zst",
        ),
        (
            "a.bin",
            "unknown file type; readable are .parquet, JSON lines (.jsonl, .json, .ndjson) and text "
            "(.txt, .md, .py, ...), the latter two also with .gz or .zst",
        ),
    ],
)
def test_inputs_that_are_not_there(name, message, tmp_path):
    (tmp_path / "a.bin").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as error:
        resolve_inputs([f"{tmp_path}/{name}"])
    assert str(error.value) == f"{tmp_path}/{name}: {message}"


def test_an_empty_name_is_not_the_current_folder():
    with pytest.raises(UserError) as error:
        resolve_inputs([""])
    assert str(error.value) == (
        "an input has no name, as from an empty shell variable; name files, folders, globs or URLs"
    )


def test_protocol_without_its_package(monkeypatch):
    def missing(path):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr("orthros_jax.data.readers.url_to_fs", missing)
    with pytest.raises(UserError) as error:
        resolve_inputs(["gs://bucket/a.parquet"])
    assert str(error.value) == ("gs://bucket/a.parquet: reading gs:// needs the package gcsfs: pip install gcsfs")


def test_unknown_protocol():
    with pytest.raises(UserError, match=r"^nope://bucket/a\.txt: Protocol not known: nope"):
        resolve_inputs(["nope://bucket/a.txt"])
