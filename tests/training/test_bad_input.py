"""Mistakes end `python train.py` with exit code 2 and one line, and leave nothing behind."""

import errno
import os
import subprocess
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_run import LENGTH, checkpoint_steps, config_of, copy_run, make_data, on_devices, run, write_text

import train
from orthros_jax.config_reader import save_config
from orthros_jax.data.dataset import TokenDataset
from orthros_jax.errors import run_command
from orthros_jax.training import trainer
from orthros_jax.training.metrics import MetricsWriter

pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.fixture
def settings_file(data, tmp_path):
    """A configuration that works; what a test changes makes it fail."""
    path = tmp_path / "run.yaml"
    save_config(config_of(tmp_path / "run", data), path)
    return path


@pytest.fixture
def fails(settings_file, tmp_path, capfd):
    """Returns fails(options) -> message, for a run on one device.

    With `keep` it must fail before it has printed or written anything.
    """

    def fails(*options, keep=True, devices=1):
        before = _tree(tmp_path)
        with on_devices(devices):
            code = run_command(train.main, ["--config", str(settings_file), *options], prog="train.py")
        captured = capfd.readouterr()
        assert code == 2
        # A progress bar of the preparation ends its own line.
        (line,) = (line for line in captured.err.splitlines() if line.startswith("train.py: "))
        assert captured.err.endswith(line + "\n")
        assert "Traceback" not in captured.err
        if keep:
            assert captured.out == ""
            assert _tree(tmp_path) == before
        return line.removeprefix("train.py: error: ")

    return fails


def _tree(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def _edit(path: Path, before: str, after: str) -> int:
    """Changes a line of a file and returns its number."""
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))
    return text[: text.index(before)].count("\n") + 1


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "  learning_rate: 0.02",
            "  learning_rat: 0.02",
            "optimizer.learning_rat: no such setting; did you mean optimizer.learning_rate?",
        ),
        (
            "  learning_rate: 0.02",
            "  learning_rate: '0.02'",
            "optimizer.learning_rate: must be a number, got the text '0.02'; remove the quotes",
        ),
        (
            "  batch_size: 8",
            "  batch_size: true",
            "training.batch_size: must be a whole number, got true",
        ),
        (
            "mesh:\n  data: -1\n  fsdp: 1\n  tensor: 1\n  context: 1",
            "mesh: 8",
            "mesh: is a section, its settings go indented below it; got 8",
        ),
    ],
)
def test_settings(before, after, message, fails, settings_file):
    line = _edit(settings_file, before, after)
    assert fails() == f"{settings_file}:{line}: {message}"


def test_an_unknown_option(fails):
    expected = "command line: training.num_steps: no such setting; did you mean training.steps?"
    assert fails("--training.num_steps", "8") == expected


def test_a_missing_data_path(fails, tmp_path):
    missing = tmp_path / "missing"
    assert fails("--data.paths", str(missing)) == (
        f"{missing}: no prepared data set here; make it with "
        f"`python -m orthros_jax prepare --input FILES --output {missing}`"
    )


def test_a_missing_source(fails, tmp_path):
    source = tmp_path / "missing.jsonl"
    options = ["--data.paths", str(tmp_path / "new"), "--data.source", str(source)]
    assert fails(*options) == f"{source}: no such file or folder"


def test_no_data_path(fails):
    assert fails("--data.paths", "[]") == (
        "data.paths: no data set; name a folder written by `python -m orthros_jax prepare`"
    )


def test_documents_without_text(fails, tmp_path):
    source = tmp_path / "blank.jsonl"
    source.write_text('{"text": ""}\n{"text": " \\n\\t "}\n{"text": null}\n')
    options = ["--data.paths", str(tmp_path / "new"), "--data.source", str(source)]
    assert fails(*options) == (
        f"{tmp_path / 'new'}: the inputs hold no training text (skipped: 1 empty, 1 null, 1 whitespace; "
        "held out: 0 documents); check the files and --text_field"
    )


def test_a_truncated_parquet_file(fails, tmp_path):
    source = tmp_path / "short.parquet"
    pq.write_table(pa.table({"text": ["some text"] * 1000}), source)
    source.write_bytes(source.read_bytes()[:-100])
    message = fails("--data.paths", str(tmp_path / "new"), "--data.source", str(source))
    assert message.startswith(f"{source}: truncated or damaged parquet file, after row 0: ")
    assert message.endswith("; fetch it again, or leave such files out with --skip_corrupt")


def test_a_tokenizer_with_more_entries_than_the_model(fails, data):
    assert fails("--model.vocab_size", "256") == (
        f"{data}: tokenizer byte has 258 entries, more than model.vocab_size 256; set model.vocab_size to at "
        "least 258, or prepare the data with a smaller tokenizer"
    )


def test_a_truncated_data_set(fails, tmp_path):
    broken = make_data(tmp_path / "broken", documents=50)
    (shard,) = broken.glob("train-*.tokens")
    size = shard.stat().st_size
    os.truncate(shard, size - 2)
    assert fails("--data.paths", str(broken)) == (
        f"{shard}: {size - 2} bytes, but the index says {size}; copy the data set again, or delete it and "
        "prepare it again"
    )


# No data set is prepared for a run that cannot start.


@pytest.fixture
def unprepared(tmp_path):
    source = write_text(tmp_path / "text.jsonl", documents=20)
    return ["--data.paths", str(tmp_path / "new"), "--data.source", str(source)]


def _lines(path: Path, *settings: str) -> str:
    """Places of settings in a file."""
    lines = path.read_text().splitlines()
    return ", ".join(f"{path}:{lines.index(f'  {setting}') + 1}" for setting in settings)


def test_a_batch_that_the_devices_do_not_divide(fails, unprepared, settings_file):
    assert fails("--training.batch_size", "20", *unprepared, devices=4) == (
        f"command line, {_lines(settings_file, 'data: -1', 'fsdp: 1')}: training.batch_size: 20 is not a multiple "
        "of 4 batch shards (mesh.data x mesh.fsdp) x 2 accumulation steps; the nearest that work: 16 or 24"
    )


def test_key_and_value_heads_that_the_tensor_axis_does_not_divide(fails, unprepared, settings_file):
    assert fails("--mesh.tensor", "4", *unprepared, devices=4) == (
        f"command line, {_lines(settings_file, 'num_kv_heads: 2')}: mesh.tensor: 4 does not divide "
        "model.num_kv_heads 2; choose a divisor of it"
    )


def test_a_mesh_of_another_size(fails, unprepared, settings_file):
    assert fails("--mesh.data", "3", *unprepared, devices=4) == (
        f"command line, {_lines(settings_file, 'fsdp: 1', 'tensor: 1', 'context: 1')}: mesh: data 3 x fsdp 1 x "
        "context 1 x tensor 1 does not make the 4 devices of this run; choose axes whose product is that number"
    )


def test_a_sequence_longer_than_the_model_is_meant_for(fails, unprepared, settings_file):
    assert fails("--data.sequence_length", "65", *unprepared) == (
        f"command line, {_lines(settings_file, 'max_sequence_length: 64')}: data.sequence_length: 65 is longer "
        "than model.max_sequence_length 64; shorten the sequences or raise the limit"
    )


def test_a_sequence_longer_than_the_data_is_padded(data):
    """Not a mistake: one window holds all the text, the rest of it is padding."""
    tokens = TokenDataset(data, "train", LENGTH).tokens
    whole = TokenDataset(data, "train", 2 * tokens)
    assert len(whole) == 1
    assert np.count_nonzero(whole[0]["segment_ids"]) == tokens


def test_a_run_folder_that_is_a_file(fails, unprepared, tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    for run_dir in (file, file / "run"):
        assert fails("--run_dir", str(run_dir), *unprepared) == (
            f"command line: run_dir: {file} is a file; name a folder"
        )


def test_a_run_folder_that_cannot_be_written(fails, unprepared, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    # The superuser may write anywhere.
    with mock.patch.object(os, "access", lambda path, mode: Path(path) != locked):
        assert fails("--run_dir", str(locked / "run"), *unprepared) == (
            f"command line: run_dir: {locked} cannot be written; name another folder"
        )


def test_resuming_with_another_model(fails, finished, settings_file, tmp_path):
    copy_run(finished.run_dir, tmp_path / "run")
    assert fails("--model.model_dim", "32") == (
        f"command line: model.model_dim: 32 differs from 16, with which the run in {tmp_path / 'run'} was "
        "started; keep 16, or start a new run with another run_dir"
    )


def test_a_backend_that_this_machine_lacks(fails, data):
    message = fails("--model.attention_impl", "cudnn", keep=False)
    start = "command line: model.attention_impl: dual_stream_attention: impl='cudnn' is not possible here: "
    assert message.startswith(start)
    assert message.endswith("; auto takes one that works")


# A full disk


@pytest.fixture
def small_disk(finished, tmp_path):
    """A file system with room for few checkpoints and the 1 MiB that is demanded besides."""
    disk = tmp_path / "disk"
    disk.mkdir()
    files = (path for path in (finished.run_dir / "checkpoints" / "4").rglob("*") if path.is_file())
    kilobytes = sum(-(-path.stat().st_size // 4096) for path in files) * 4
    options = f"size={1024 + int(2.5 * kilobytes)}k"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small file system: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_full_disk_leaves_the_last_good_step(fails, finished, small_disk, data):
    run_dir = small_disk / "run"
    options = ["--run_dir", str(run_dir), "--checkpoint.every", "1", "--checkpoint.keep_last", "9"]
    message = fails(*options, keep=False)
    kept = checkpoint_steps(run_dir)
    assert kept in ([1], [1, 2], [1, 2, 3])
    assert [path.name for path in (run_dir / "checkpoints").iterdir() if not path.name.isdecimal()] == []
    assert message == (
        f"cannot save step {kept[-1] + 1} in {run_dir / 'checkpoints'}: No space left on device; checkpoint "
        f"{kept[-1]} is intact. Free space or set run_dir to another disk, then start the same command again to "
        "resume."
    )
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    freed = run(config_of(run_dir, data))
    assert freed.code == 0
    assert f"Resuming at step {kept[-1]}\n" in freed.out
    assert freed.steps == finished.steps


def test_a_full_disk_under_the_metrics(fails, tmp_path):
    def write(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(MetricsWriter, "write", write):
        message = fails(keep=False)
    assert message == (
        f"{tmp_path / 'run'}: no space left on the disk; free some and run the same command again, it continues "
        "from the newest checkpoint"
    )


def test_another_fault_of_the_system_keeps_its_traceback(settings_file):
    def write(*_):
        raise OSError(errno.EIO, "Input/output error")

    with (
        mock.patch.object(trainer.MetricsWriter, "write", write),
        on_devices(1),
        pytest.raises(OSError, match="Input/output error"),
    ):
        run_command(train.main, ["--config", str(settings_file)], prog="train.py")
