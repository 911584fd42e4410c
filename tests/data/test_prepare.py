"""Preparing: the bytes, the counts, interruptions, refusals and the command."""

import collections
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orthros_jax.__main__ import main as command
from orthros_jax.config import DataConfig
from orthros_jax.data import parts, storage
from orthros_jax.data.dataset import TokenDataset, dataset_tokenizer
from orthros_jax.data.prepare import prepare, prepare_if_missing
from orthros_jax.data.readers import InputFile
from orthros_jax.data.tokenizer import ByteTokenizer
from orthros_jax.errors import UserError

ROOT = Path(__file__).parents[2]
BOS, EOS = 256, 257


def run(inputs, output, **changes):
    settings = {"progress": False, "workers": 1, "holdout": 0.0} | changes
    return prepare([str(item) for item in inputs], output, **settings)


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def documents(folder, split="train"):
    """The documents of a split, straight from its files."""
    index = json.loads((folder / "index.json").read_text())
    found = []
    for shard in index["splits"][split]["shards"]:
        tokens = np.fromfile(folder / f"{shard['name']}.tokens", index["dtype"])
        ends = np.fromfile(folder / f"{shard['name']}.offsets", "<i8")
        assert ends[-1] == len(tokens) == shard["tokens"]
        assert len(ends) == shard["documents"]
        found += [part.tolist() for part in np.split(tokens, ends[:-1])]
    return found


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def corpus(tmp_path):
    """Six JSON-lines files of unlike sizes and 300 documents in all."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    rng = np.random.default_rng(0)
    words = np.array(["alpha", "beta", "gamma", "délta", "🦊"])
    for number, rows in enumerate((10, 90, 1, 120, 40, 39)):
        texts = [" ".join(rng.choice(words, rng.integers(1, 30))) + f" {number} {row}" for row in range(rows)]
        write_jsonl(folder / f"{number}.jsonl", texts)
    return folder


def texts_of(corpus):
    return [json.loads(line)["text"] for path in sorted(corpus.iterdir()) for line in path.read_text().splitlines()]


def test_documents_in_order(corpus, tmp_path):
    index = run([corpus], tmp_path / "set")
    texts = texts_of(corpus)
    assert documents(tmp_path / "set") == [[BOS, *text.encode(), EOS] for text in texts]
    train = index["splits"]["train"]
    assert train["documents"] == 300
    assert train["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert train["tokens"] == train["text_bytes"] + 600
    assert sorted(contents(tmp_path / "set")) == [
        "index.json",
        "manifest.json",
        *(f"train-0000{i}.{suffix}" for i in range(6) for suffix in ("offsets", "tokens")),
    ]
    dataset = TokenDataset(tmp_path / "set", "train", 50)
    stream = [token for text in texts for token in (BOS, *text.encode(), EOS)]
    windows = [token for window in dataset for token in window["tokens"][1:].tolist()]
    assert [stream[0], *windows[: len(stream) - 1]] == stream


@pytest.mark.parametrize("tokenizer", ["byte", "train:300"])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_bos_and_eos_exactly_once(bos, eos, tokenizer, tmp_path):
    texts = ["a", "b", "", "<|bos|> and <|eos|>", "longer text " * 9]
    index = run([write_jsonl(tmp_path / "a.jsonl", texts)], tmp_path / "set", tokenizer=tokenizer, bos=bos, eos=eos)
    made = dataset_tokenizer(tmp_path / "set")
    found = documents(tmp_path / "set")
    assert [made.decode(ids) for ids in found] == [text for text in texts if text]
    for ids in found:
        assert ids.count(made.bos_id) == (ids[0] == made.bos_id) == bos
        assert ids.count(made.eos_id) == (ids[-1] == made.eos_id) == eos
    assert (index["bos"], index["eos"]) == (bos, eos)
    assert index["skipped"] == {"empty": 1}


def test_token_type_follows_the_vocabulary():
    assert [parts.token_dtype(size) for size in (258, 65536, 65537)] == ["<u2", "<u2", "<u4"]


@pytest.mark.parametrize("bos", [True, False])
def test_rows_without_text_are_counted(bos, tmp_path):
    long = "x" * 1_000_000
    rows = ["", "   \n\t", None, "ok", "a\ud800b", "🦊", long, "\u2003", None]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    index = run([tmp_path / "a.jsonl"], tmp_path / "set", bos=bos, eos=False)
    assert index["skipped"] == {"empty": 1, "null": 2, "whitespace": 2}
    decoded = [ByteTokenizer().decode(ids) for ids in documents(tmp_path / "set")]
    assert decoded == ["ok", "a\ufffdb", "🦊", long]
    for window in TokenDataset(tmp_path / "set", "train", 512):
        assert window["segment_ids"][:2].all()


def test_documents_that_a_tokenizer_turns_into_nothing(tmp_path):
    from tokenizers import Tokenizer, models, normalizers

    backend = Tokenizer(models.WordLevel({"a": 0, "[BOS]": 1}, unk_token="a"))
    backend.normalizer = normalizers.Replace("~", "")
    backend.save(str(tmp_path / "tokenizer.json"))
    source = write_jsonl(tmp_path / "a.jsonl", ["a", "~", "a"])
    index = run([source], tmp_path / "set", tokenizer=str(tmp_path / "tokenizer.json"), eos=False)
    assert documents(tmp_path / "set") == [[1, 0], [1, 0]]
    assert index["skipped"] == {"no_tokens": 1}


def test_parquet_shards_that_differ(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["zero"]}), folder / "0.parquet")
    pq.write_table(pa.table({"text": ["one"], "meta": [{"a": 1}]}), folder / "1.parquet")
    pq.write_table(pa.table({"text": pa.array(["two"], pa.large_string())}), folder / "2.parquet")
    pq.write_table(pa.table({"text": [str(i) for i in range(100)]}), folder / "3.parquet")
    whole = (folder / "3.parquet").read_bytes()
    (folder / "3.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=rf"^{folder}/3\.parquet: truncated or damaged parquet file"):
        run([folder], tmp_path / "set")
    index = run([folder], tmp_path / "other", skip_corrupt=True)
    assert [ByteTokenizer().decode(ids) for ids in documents(tmp_path / "other")] == ["zero", "one", "two"]
    assert index["skipped"] == {"corrupt_file": 1}


def test_repairing_a_damaged_file_does_not_need_a_new_folder_before_anything_is_done(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "x"}')
    with pytest.raises(UserError, match="no key 'text'"):
        run([tmp_path / "a.jsonl"], tmp_path / "set")
    assert not (tmp_path / "set").exists()
    run([tmp_path / "a.jsonl"], tmp_path / "set", text_field="content")
    assert documents(tmp_path / "set") == [[BOS, ord("x"), EOS]]


@pytest.mark.parametrize("tokenizer", ["byte", "train:300"])
def test_bytes_do_not_depend_on_the_number_of_workers(tokenizer, corpus, tmp_path):
    for workers in (1, 3):
        run([corpus], tmp_path / f"set{workers}", workers=workers, holdout=0.2, tokenizer=tokenizer)
    assert contents(tmp_path / "set1") == contents(tmp_path / "set3")


def test_held_out_documents(corpus, tmp_path):
    index = run([corpus], tmp_path / "set", holdout=0.2)
    train, heldout = documents(tmp_path / "set"), documents(tmp_path / "set", "heldout")
    assert 35 < len(heldout) < 85
    assert index["splits"]["heldout"]["documents"] == len(heldout)
    everything = [[BOS, *text.encode(), EOS] for text in texts_of(corpus)]
    assert collections.Counter(map(tuple, train + heldout)) == collections.Counter(map(tuple, everything))
    # The draw is by text: other files and another order hold out the same documents.
    merged = write_jsonl(tmp_path / "merged.jsonl", reversed(texts_of(corpus)))
    run([merged], tmp_path / "again", holdout=0.2)
    assert sorted(documents(tmp_path / "again", "heldout")) == sorted(heldout)


def test_equal_documents_share_a_split(tmp_path):
    texts = [f"document {i % 40}" for i in range(400)]
    run([write_jsonl(tmp_path / "a.jsonl", texts)], tmp_path / "set", holdout=0.3)
    train, heldout = documents(tmp_path / "set"), documents(tmp_path / "set", "heldout")
    assert heldout
    assert not {tuple(ids) for ids in train} & {tuple(ids) for ids in heldout}


def test_small_text_files_share_a_part():
    def file(name, size):
        return InputFile(name, size, "")

    half = parts.PART_BYTES // 2
    files = [
        file("a.txt", half),
        file("b.txt", half),
        file("c.txt", 1),
        file("d.jsonl", 1),
        file("e.jsonl", 1),
    ]
    files += [file("f.txt", 1), file("g.txt", 3 * half), file("h.txt", 0), file("i.parquet", 9)]
    groups = [[f.path[0] for f in group] for group in parts.group_files(files)]
    assert groups == [["a", "b"], ["c"], ["d"], ["e"], ["f"], ["g"], ["h"], ["i"]]


def test_standard_library(tmp_path):
    index = run(["python-stdlib"], tmp_path / "set")
    heldout = documents(tmp_path / "set", "heldout")
    assert index["splits"]["heldout"]["documents"] == len(heldout) > 10
    assert any(b"class JSONDecoder" in bytes(ids[1:-1]) for ids in heldout)
    assert not any(b"class JSONDecoder(" in bytes(ids[1:-1]) for ids in documents(tmp_path / "set"))


def test_standard_library_with_something_else(tmp_path):
    with pytest.raises(UserError) as error:
        run(["python-stdlib", tmp_path], tmp_path / "set")
    assert str(error.value) == (
        "python-stdlib is a corpus by itself; prepare the other inputs into another folder and mix them"
    )


def test_running_again_changes_nothing(corpus, tmp_path):
    first = run([corpus], tmp_path / "set", tokenizer="train:300")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").iterdir()}
    assert run([corpus], tmp_path / "set", tokenizer="train:300") == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "set").iterdir()} == before


REFUSAL = (
    "{output}: holds a data set prepared differently ({what}); choose another output, repeat the earlier "
    "arguments, "
    "or delete the folder to prepare it anew"
)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"bos": False}, "bos_id was 256, now None"),
        ({"eos": False}, "eos_id was 257, now None"),
        ({"text_field": "body"}, "text_field was text, now body"),
        ({"holdout": 0.5}, "holdout was 0.0, now 0.5"),
        (
            {"tokenizer": "train:300", "bos": False, "eos": False},
            f"tokenizer was byte, now train:300; fingerprint was {ByteTokenizer.fingerprint}, now None; "
            "bos_id was 256, now None; eos_id was 257, now None",
        ),
    ],
)
def test_a_set_made_with_other_flags_is_refused(changes, what, corpus, tmp_path):
    run([corpus], tmp_path / "set")
    before = contents(tmp_path / "set")
    with pytest.raises(UserError) as error:
        run([corpus], tmp_path / "set", **changes)
    assert str(error.value) == REFUSAL.format(output=tmp_path / "set", what=what)
    assert contents(tmp_path / "set") == before


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda corpus: (corpus / "1.jsonl").write_text('{"text": "new"}'), "changed input {corpus}/1.jsonl"),
        (lambda corpus: (corpus / "1.jsonl").unlink(), "missing input {corpus}/1.jsonl"),
        (
            lambda corpus: [(corpus / f"{n}.txt").write_text("x") for n in "ab"],
            "new input {corpus}/a.txt and 1 more",
        ),
    ],
)
def test_other_inputs_are_refused(change, what, corpus, tmp_path):
    run([corpus], tmp_path / "set")
    change(corpus)
    with pytest.raises(UserError) as error:
        run([corpus], tmp_path / "set")
    assert str(error.value) == REFUSAL.format(output=tmp_path / "set", what=what.format(corpus=corpus))


def test_skipping_damaged_files_where_there_was_none_changes_nothing(corpus, tmp_path):
    run([corpus], tmp_path / "set")
    before = contents(tmp_path / "set")
    run([corpus], tmp_path / "set", skip_corrupt=True)
    assert contents(tmp_path / "set") == before


def test_not_skipping_damaged_files_any_more_is_refused(corpus, tmp_path):
    (corpus / "3.jsonl").write_text("{")
    run([corpus], tmp_path / "set", skip_corrupt=True)
    with pytest.raises(UserError, match="skip_corrupt was True, now False"):
        run([corpus], tmp_path / "set")


@pytest.mark.parametrize("tokenizer", ["byte", "train:300"])
@pytest.mark.parametrize("fix", ["repair", "skip"])
def test_a_damaged_file_costs_no_finished_part(fix, tokenizer, corpus, tmp_path, monkeypatch):
    damaged = corpus / "3.jsonl"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole + b"{")
    # The tokenizer is trained on the start of every file and does not come as far as the damage.
    monkeypatch.setattr("orthros_jax.data.prepare.TRAINING_CHARACTERS", 100)
    with pytest.raises(UserError, match=r"3\.jsonl: line 121 is not JSON"):
        run([corpus], tmp_path / "set", tokenizer=tokenizer)
    read, original = [], parts.read_documents
    monkeypatch.setattr(parts, "read_documents", lambda path, field: read.append(path) or original(path, field))
    changes = {"skip_corrupt": fix == "skip", "tokenizer": tokenizer}
    if fix == "repair":
        damaged.write_bytes(whole)
        if tokenizer != "byte":
            with pytest.raises(UserError, match="changed input"):
                run([corpus], tmp_path / "set", **changes)
            return
    run([corpus], tmp_path / "set", **changes)
    assert read == [str(corpus / f"{n}.jsonl") for n in (3, 4, 5)]
    run([corpus], tmp_path / "anew", **changes)
    assert contents(tmp_path / "set") == contents(tmp_path / "anew")


def test_changed_inputs_of_finished_parts_are_refused_in_an_unfinished_set(corpus, tmp_path):
    (corpus / "3.jsonl").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        run([corpus], tmp_path / "set")
    write_jsonl(corpus / "3.jsonl", ["whole"])
    write_jsonl(corpus / "1.jsonl", ["other"])
    with pytest.raises(UserError) as error:
        run([corpus], tmp_path / "set")
    what = f"changed input {corpus}/1.jsonl"
    assert str(error.value) == REFUSAL.format(output=tmp_path / "set", what=what)


def test_an_output_that_cannot_be_written(corpus, tmp_path, monkeypatch):
    output = tmp_path / "set"
    output.mkdir()
    # The superuser may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != output)
    with pytest.raises(UserError) as error:
        run([corpus], output)
    assert str(error.value) == f"{output}: cannot be written; choose another output"
    assert not list(output.iterdir())


def test_the_same_tokenizer_from_another_folder_is_accepted(corpus, tmp_path):
    run([corpus], tmp_path / "trained", tokenizer="train:300")
    copy = tmp_path / "copy"
    copy.mkdir()
    content = (tmp_path / "trained" / "tokenizer.json").read_bytes()
    (copy / "tokenizer.json").write_bytes(content)
    run([corpus], tmp_path / "set", tokenizer=str(tmp_path / "trained"))
    run([corpus], tmp_path / "set", tokenizer=str(copy))
    (copy / "tokenizer.json").write_bytes(content + b"\n")
    with pytest.raises(UserError, match="fingerprint was"):
        run([corpus], tmp_path / "set", tokenizer=str(copy))


def test_a_foreign_folder_is_refused(corpus, tmp_path):
    with pytest.raises(UserError) as error:
        run([corpus], corpus)
    assert str(error.value) == (f"{corpus}: is neither empty nor a prepared data set; choose another output folder")
    assert len(list(corpus.iterdir())) == 6


def test_output_that_is_a_file(corpus, tmp_path):
    with pytest.raises(UserError) as error:
        run([corpus], corpus / "0.jsonl")
    assert str(error.value) == f"{corpus}/0.jsonl: cannot be created: File exists; choose another output"


@pytest.mark.parametrize("stop_at", range(1, 12, 2))
def test_interrupted_by_an_exception_at_any_file(stop_at, corpus, tmp_path, monkeypatch):
    run([corpus], tmp_path / "whole", holdout=0.2, tokenizer="train:300")
    original, calls = os.replace, []

    def replace(*arguments):
        calls.append(arguments)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        original(*arguments)

    monkeypatch.setattr(storage.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        run([corpus], tmp_path / "set", holdout=0.2, tokenizer="train:300")
    monkeypatch.undo()
    assert not (tmp_path / "set" / "index.json").exists()
    run([corpus], tmp_path / "set", holdout=0.2, tokenizer="train:300")
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


def test_finished_parts_are_not_made_again(corpus, tmp_path, monkeypatch):
    read, original = [], parts.read_documents

    def spy(path, field):
        read.append(Path(path).name)
        if len(read) == 4:
            raise KeyboardInterrupt
        return original(path, field)

    monkeypatch.setattr(parts, "read_documents", spy)
    with pytest.raises(KeyboardInterrupt):
        run([corpus], tmp_path / "set")
    run([corpus], tmp_path / "set")
    assert read == [f"{i}.jsonl" for i in (0, 1, 2, 3, 3, 4, 5)]


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
    """kill -9 on the parent of two workers, at moments spread over the run; then the same bytes."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(6):
        write_jsonl(corpus / f"{number}.jsonl", [f"{number} {row} " + "word " * 50 for row in range(1500)])
    arguments = ["--input", str(corpus), "--tokenizer", "train:400", "--workers", "2", "--holdout", "0.1"]
    assert command(["prepare", *arguments, "--output", str(tmp_path / "whole")]) == 0
    expected = contents(tmp_path / "whole")
    kills = 0
    for moment in (0.3, 0.7, 1.0, 1.3, 1.6, 2.0):
        output = tmp_path / f"killed-{moment}"
        line = [sys.executable, "-m", "orthros_jax", "prepare", *arguments, "--output", str(output)]
        process = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.DEVNULL)
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        deadline = time.monotonic() + 60
        while command(["prepare", *arguments, "--output", str(output)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert contents(output) == expected
    assert kills >= 3


def test_two_at_once_are_refused(corpus, tmp_path):
    (tmp_path / "set").mkdir()
    with storage.folder_lock(tmp_path / "set", "busy"), pytest.raises(UserError) as error:
        run([corpus], tmp_path / "set")
    assert str(error.value) == (
        f"{tmp_path}/set: another process is preparing this data set; wait for it, or choose another output"
    )
    run([corpus], tmp_path / "set")


class FullDisk:
    """A file whose first write finds the disk full."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stream.close()

    def write(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", ["train-00003.tokens", "manifest.json", "index.json"])
def test_full_disk(name, corpus, tmp_path, monkeypatch):
    def open_full(path, mode):
        stream = open(path, mode)  # noqa: SIM115
        return FullDisk(stream) if Path(path).name.startswith(name) else stream

    run([corpus], tmp_path / "whole")
    monkeypatch.setattr(storage, "open", open_full, raising=False)
    with pytest.raises(UserError) as error:
        run([corpus], tmp_path / "set")
    assert str(error.value) == (
        f"{tmp_path}/set: no space left on the disk; free some and run the same command again, it continues"
    )
    monkeypatch.undo()
    assert not list(tmp_path.glob("set/*.partial-*"))
    run([corpus], tmp_path / "set")
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_file_stops_all_workers(workers, corpus, tmp_path):
    (corpus / "2.jsonl").write_text('{"text": "a"}\n{"text"')
    with pytest.raises(UserError) as error:
        run([corpus], tmp_path / "set", workers=workers)
    assert str(error.value) == (
        f"{corpus}/2.jsonl: line 2 is not JSON: Expecting ':' delimiter: line 1 column 8 (char 7)"
    )
    assert not list(tmp_path.glob("set/*.partial-*"))
    assert not list(tmp_path.glob("set/index.json"))


def test_corpus_without_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": " "}\n{"text": "\\n"}\n{"text": null}\n')
    with pytest.raises(UserError) as error:
        run([tmp_path / "a.jsonl"], tmp_path / "set")
    assert str(error.value) == (
        f"{tmp_path}/set: the inputs hold no training text (skipped: 1 empty, 1 null, 2 whitespace; held "
        "out: 0 "
        "documents); check the files and --text_field"
    )
    assert not (tmp_path / "set").exists()


def test_corpus_of_empty_files(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(UserError, match=r"no training text \(skipped: no rows at all; held out: 0 documents\)"):
        run([tmp_path / "a.jsonl"], tmp_path / "set")


def test_everything_held_out(tmp_path):
    with pytest.raises(UserError, match=r"held out: 1 documents\); .*, or lower --holdout"):
        run([write_jsonl(tmp_path / "a.jsonl", ["a"])], tmp_path / "set", holdout=0.999999)


def test_prepare_if_missing(corpus, tmp_path):
    data = DataConfig(paths=[str(tmp_path / "set")], source=str(corpus), tokenizer="train:300")
    prepare_if_missing(data)
    assert dataset_tokenizer(tmp_path / "set").vocab_size == 300
    # A finished data set is used as it is, whatever has become of its source.
    prepare_if_missing(DataConfig(paths=data.paths, source=str(tmp_path / "gone"), tokenizer="byte"))
    prepare_if_missing(DataConfig(paths=[str(tmp_path / "none")]))


def test_tokenizer_of_a_set_must_be_the_original(corpus, tmp_path):
    run([corpus], tmp_path / "set", tokenizer="train:300")
    file = tmp_path / "set" / "tokenizer.json"
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(UserError, match="not the tokenizer that the data set was made with; put the original back"):
        dataset_tokenizer(tmp_path / "set")
    file.unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json: missing; copy the tokenizer\.json"):
        dataset_tokenizer(tmp_path / "set")


def test_command(corpus, tmp_path, capsys):
    output = str(tmp_path / "set")
    arguments = ["--input", str(corpus / "0.jsonl"), str(corpus / "1.jsonl"), "--output", output]
    assert command(["prepare", *arguments, "--no_bos", "--workers", "1", "--holdout", "0"]) == 0
    assert len(documents(tmp_path / "set")) == 100
    assert all(BOS not in ids and ids[-1] == EOS for ids in documents(tmp_path / "set"))
    shown = capsys.readouterr().err
    assert f"{output}: tokenizer byte, vocabulary 258" in shown
    assert "100 documents" in shown
    assert "the held-out split is empty, so there is nothing to evaluate on; raise --holdout" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "{tmp}/none.txt"], "{tmp}/none.txt: no such file or folder"),
        (["--input", "{tmp}/a.txt", "--holdout", "1"], "holdout 1.0 must be at least 0 and below 1"),
        (["--input", "{tmp}/a.txt", "--workers", "0"], "workers 0 must be at least 1"),
        (
            ["--input", "{tmp}/a.txt", "--tokenizer", "train:x"],
            "tokenizer train:x: the size must be a whole number of at least 258",
        ),
        (
            ["--input", "{tmp}/a.txt", "--tokenizer", "{tmp}/words.json"],
            "{tmp}/words.json: this tokenizer names no BOS token; give its spelling with --bos_token, or do "
            "without "
            "with --no_bos",
        ),
    ],
)
def test_mistakes_end_with_code_2_and_one_line(arguments, message, tmp_path, capsys):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("text")
    line = [argument.format(tmp=tmp_path) for argument in arguments]
    assert command(["prepare", *line, "--output", str(tmp_path / "set")]) == 2
    shown = capsys.readouterr().err
    assert shown == f"python -m orthros_jax prepare: error: {message.format(tmp=tmp_path)}\n"
    assert not (tmp_path / "set").exists()


def test_unknown_argument(capsys):
    with pytest.raises(SystemExit) as error:
        command(["prepare", "--input", "a", "--output", "b", "--tokeniser", "byte"])
    assert error.value.code == 2
    assert "unrecognized arguments: --tokeniser byte" in capsys.readouterr().err
