"""metrics.jsonl, TensorBoard and W&B over kills and resumptions; the progress line."""

import json
import math
import os
import signal
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

from orthros_jax.config import MetricsConfig
from orthros_jax.errors import UserError
from orthros_jax.training import progress as progress_module
from orthros_jax.training.metrics import MetricsWriter, peak_flops_per_second, read_metrics
from orthros_jax.training.progress import Progress

PLAIN = MetricsConfig(tensorboard=False)


def write(run_dir, steps, resume_step=0, config=PLAIN, **extra):
    writer = MetricsWriter(config, run_dir, resume_step)
    for step in steps:
        writer.write(step, {"loss": 1.0 / step, **extra})
    writer.close()


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps(run_dir):
    return [line["step"] for line in lines(run_dir)]


def test_one_json_object_a_line(tmp_path):
    writer = MetricsWriter(PLAIN, tmp_path / "a" / "run", 0)
    writer.write(1, {"loss": jnp.float32(2.5), "tokens": np.int64(2**40), "skipped_steps": 0, "note": "ä"})
    # On disk at once: a kill loses nothing that was written.
    assert lines(tmp_path / "a" / "run") == [{"step": 1, "loss": 2.5, "tokens": 2**40, "skipped_steps": 0, "note": "ä"}]
    writer.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), jnp.float32("inf")])
def test_non_finite_is_null(tmp_path, value):
    write(tmp_path, [1], grad_norm=value)

    def refuse(constant):
        raise ValueError(constant)

    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse) == {"step": 1, "loss": 1.0, "grad_norm": None}


def test_resuming_drops_later_steps_and_keeps_earlier_ones(tmp_path):
    write(tmp_path, range(1, 8))
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    write(tmp_path, range(5, 10), resume_step=4)
    assert steps(tmp_path) == list(range(1, 10))
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[:4] == before[:4]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_new_run_in_an_old_folder_starts_empty(tmp_path):
    write(tmp_path, range(1, 4))
    write(tmp_path, [1])
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("tail", ['{"step": 3, "lo', '{"step": 3', "\0\0\0", '{"step": 3, "loss": 0.3}', "7\n", "{}\n"])
def test_torn_last_line(tmp_path, tail):
    write(tmp_path, [1, 2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail)
    write(tmp_path, [4], resume_step=3)
    assert steps(tmp_path) == ([1, 2, 3, 4] if tail.endswith("0.3}") else [1, 2, 4])


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    write(tmp_path / "run", [1, 2], config=MetricsConfig())
    assert not (tmp_path / "run").exists()


def test_killed_process_leaves_whole_lines(tmp_path):
    program = f"""
from orthros_jax.config import MetricsConfig
from orthros_jax.training.metrics import MetricsWriter
writer = MetricsWriter(MetricsConfig(tensorboard=False), {str(tmp_path)!r}, 0)
for step in range(1, 10**9):
    writer.write(step, {{"loss": 0.5, "grad_norm": 1.0}})
    if step == 500:
        print("ready", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    last = len(read_metrics(tmp_path / "metrics.jsonl"))
    assert last >= 500
    write(tmp_path, [last + 1], resume_step=last)
    assert steps(tmp_path) == list(range(1, last + 2))


def tensorboard_events(run_dir):
    events = []
    for file in sorted((run_dir / "tensorboard").iterdir(), key=lambda p: (p.stat().st_mtime_ns, p.name)):
        data = file.read_bytes()
        while data:  # TFRecord: length in 8 bytes, its checksum in 4, the event, its checksum in 4
            size = int.from_bytes(data[:8], "little")
            events.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return events


def test_tensorboard_purges_what_is_written_again(tmp_path):
    config = MetricsConfig(tensorboard=True)
    write(tmp_path, [1, 2, 3], config=config, mode="text is left out")
    write(tmp_path, [3, 4], config=config, resume_step=2)
    events = tensorboard_events(tmp_path)
    scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert [(step, tag) for step, tag, _ in scalars] == [(s, "loss") for s in (1, 2, 3, 3, 4)]
    assert scalars[0][2] == 1.0
    starts = [e.step for e in events if e.HasField("session_log")]
    assert starts[-1] == 3


class FakeWandb(types.ModuleType):
    def __init__(self, reachable=True):
        super().__init__("wandb")
        self.reachable, self.started, self.logged = reachable, [], []
        self.finished = 0

    def Settings(self, **options):
        return options

    def init(self, **options):
        self.started.append(options)
        if options["mode"] == "online" and not self.reachable:
            raise ConnectionError("no route to host")
        return self

    def log(self, values, step):
        if step == 3:
            raise ConnectionError("server went away")
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


def test_wandb_gets_a_run_for_each_start(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = MetricsConfig(tensorboard=False, wandb="offline", wandb_project="mine")
    write(tmp_path / "run", [1], config=config)
    write(tmp_path / "run", [2], resume_step=1, config=config)
    assert [(o["mode"], o["project"], o["group"], o["name"]) for o in wandb.started] == [
        ("offline", "mine", "run", "run from step 0"),
        ("offline", "mine", "run", "run from step 1"),
    ]
    assert wandb.logged == [(1, {"loss": 1.0}), (2, {"loss": 0.5})]
    assert wandb.finished == 2


def test_wandb_without_network_goes_offline(tmp_path, monkeypatch, capsys):
    wandb = FakeWandb(reachable=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write(tmp_path, [1], config=MetricsConfig(tensorboard=False, wandb="online"))
    assert [o["mode"] for o in wandb.started] == ["online", "offline"]
    assert wandb.logged == [(1, {"loss": 1.0})]
    assert capsys.readouterr().err == ("Weights & Biases cannot be reached, going on offline: no route to host\n")


def test_wandb_that_fails_later_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write(tmp_path, [2, 3, 4], config=MetricsConfig(tensorboard=False, wandb="online"))
    assert steps(tmp_path) == [2, 3, 4]
    assert [step for step, _ in wandb.logged] == [2]
    assert capsys.readouterr().err == "Weights & Biases failed and is off from here on: server went away\n"


def test_wandb_absent(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError) as caught:
        MetricsWriter(MetricsConfig(wandb="offline"), tmp_path / "run", 0)
    assert str(caught.value) == (
        "metrics.wandb is offline, but wandb is not installed; run `pip install wandb` or set metrics.wandb to off"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA L40S", 362),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5e", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("TPU v6e", 918),
    ],
)
def test_peak_of_known_devices(kind, tflops):
    assert peak_flops_per_second(kind) == tflops * 1e12


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA GeForce GTX 1080", ""])
def test_no_peak_for_others(kind):
    assert peak_flops_per_second(kind) is None


def test_progress_in_a_log_file_is_a_line_every_ten_seconds(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
    progress = Progress(1000, 0)
    for step in range(1, 1001):
        clock[0] += 0.0625
        progress.update(step, 2.0, 12_345.0)
    progress.close()
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "step 1/1000 loss 2.0000 12.3k tokens/s 0:01:02 left"
    assert err[1].startswith("step 161/1000 ")
    assert err[-1] == "step 1000/1000 loss 2.0000 12.3k tokens/s 0:00:00 left"
    assert len(err) == 8


def test_progress_on_a_terminal_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = Progress(20, 5)
    progress.update(6, 3.25, 2e6)
    progress.message("held-out loss 3.1")
    progress.update(20, 3.0, 900.0)
    progress.close()
    out, err = capsys.readouterr()
    assert out == "held-out loss 3.1\n"
    last = err.rstrip("\n").split("\r")[-1]
    assert last.startswith("step 20/20 |")
    assert "loss 3.0000 900 tokens/s" in last
    assert err.count("\n") == 1


def test_progress_off_still_prints_messages(capsys):
    progress = Progress(20, enabled=False)
    progress.update(1, 3.0, 1.0)
    progress.message("hello")
    progress.close()
    out, err = capsys.readouterr()
    assert (out, err) == ("hello\n", "")


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_pipe_does_not_end_the_run(name, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, name, stream)
        progress = Progress(10)
        for step in (1, 10):
            progress.update(step, 2.0, 3.0)
            progress.message("text")
        progress.close()


def test_only_one_process_shows_progress(capsys, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    progress = Progress(20)
    progress.update(1, 3.0, 1.0)
    progress.message("hello")
    progress.close()
    assert capsys.readouterr() == ("", "")
