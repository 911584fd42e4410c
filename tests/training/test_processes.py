"""Runs of several processes on this machine: they train as one, end when one is lost, and go on in other numbers."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from small_run import config_of, make_data, run

from orthros_jax.config import DataConfig
from orthros_jax.config_reader import save_config
from orthros_jax.data import prepare
from orthros_jax.data.prepare import INDEX_FILE
from orthros_jax.errors import UserError
from orthros_jax.training import processes

ROOT = Path(__file__).parents[2]
MUST_END_WITHIN = 60
CHANGES = {
    "training__steps": 100_000,
    "training__accumulation": 1,
    "checkpoint__every": 4,
    "checkpoint__keep_last": 2,
    "evaluation__every": 100_000,
    "optimizer__schedule_steps": 100,
}


class Group(NamedTuple):
    """Processes of one run with their logs."""

    processes: list[subprocess.Popen]
    logs: list[Path]

    def log(self, process: int) -> str:
        return self.logs[process].read_text()

    def wait(self, process: int, seconds: float = MUST_END_WITHIN) -> int:
        try:
            return self.processes[process].wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"process {process} goes on:\n{self.log(process)}")


@pytest.fixture
def start(tmp_path):
    groups = []

    def start_group(config, count: int) -> Group:
        file = tmp_path / "run.yaml"
        save_config(config, file)
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        group = Group([], [tmp_path / f"{len(groups)}-{i}.log" for i in range(count)])
        groups.append(group)
        for i, log in enumerate(group.logs):
            environment = {
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                # Most of the time is compilation, which all processes do.
                "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(i),
            }
            command = [sys.executable, str(ROOT / "train.py"), "--config", str(file)]
            with log.open("wb") as stream:
                group.processes.append(subprocess.Popen(command, stdout=stream, stderr=stream, env=environment))
        return group

    yield start_group
    for group in groups:
        for process in group.processes:
            process.kill()
            process.wait()


def _lines(run_dir):
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _wait_for_step(group, run_dir, step):
    deadline = time.monotonic() + 600
    while not any(line["step"] >= step for line in _lines(run_dir)[:-1]):
        for i, process in enumerate(group.processes):
            assert process.poll() is None, group.log(i)
        assert time.monotonic() < deadline, "\n".join(group.log(i) for i in range(len(group.logs)))
        time.sleep(0.1)


@pytest.mark.slow
def test_processes_that_are_lost_and_runs_that_go_on(start, tmp_path):
    """Four processes lose a worker, two lose their coordinator, two are told to stop; one ends the run."""
    data, run_dir = make_data(tmp_path / "data"), tmp_path / "run"
    config = config_of(run_dir, data, mesh__fsdp=2, **CHANGES)

    four = start(config, 4)
    _wait_for_step(four, run_dir, 6)
    four.processes[3].kill()
    for i in range(3):
        assert four.wait(i) == processes.LOST, four.log(i)
        assert "another process of the run is gone" in four.log(i)

    two = start(config, 2)
    _wait_for_step(two, run_dir, 12)
    two.processes[0].kill()
    assert two.wait(1) == processes.LOST, two.log(1)
    assert "another process of the run is gone" in two.log(1)
    assert "Resuming at step" in two.log(0)

    again = start(config, 2)
    _wait_for_step(again, run_dir, 18)
    again.processes[1].send_signal(signal.SIGTERM)
    assert [again.wait(0), again.wait(1)] == [0, 0], again.log(0)
    assert "Stopped by a signal to another process after step" in again.log(0)

    stopped_at = _lines(run_dir)[-1]["step"]
    changes = CHANGES | {"training__steps": stopped_at + 3}
    assert run(config_of(run_dir, data, **changes)).code == 0
    reference = run(config_of(tmp_path / "reference", data, **changes))
    lines = [line for line in _lines(run_dir) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, stopped_at + 4))
    # The same samples in the same order, summed in other orders on other numbers of processes.
    for ours, theirs in zip(lines, reference.steps, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=5e-3)


def test_only_the_first_process_prepares(tmp_path, monkeypatch):
    """Another one goes on when the folder is complete."""
    data = DataConfig(paths=[str(tmp_path / "data")], source="somewhere")
    prepared = []

    def prepare_slowly(_):
        assert prepared == []
        Path(data.paths[0]).mkdir()
        (Path(data.paths[0]) / INDEX_FILE).touch()
        prepared.append("by the other process")

    monkeypatch.setattr(prepare.time, "sleep", prepare_slowly)
    monkeypatch.setattr(prepare, "prepare", lambda *_, **__: pytest.fail("the second process prepares"))
    prepare.prepare_if_missing(data, process_index=1)
    assert prepared == ["by the other process"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_PROCESS_ID": "0"}, "JAX_PROCESS_ID without JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES"),
        (
            {"JAX_COORDINATOR_ADDRESS": "a", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
            "'a' has no port",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
            "JAX_PROCESS_ID 2 is not below JAX_NUM_PROCESSES 2",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"},
            "JAX_NUM_PROCESSES: must be a whole number, got 'two'",
        ),
    ],
)
def test_variables_that_contradict_each_other(monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        processes.several_processes()


def test_who_is_one_of_several(monkeypatch):
    assert processes.several_processes() is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert processes.several_processes() is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    assert processes.several_processes() == {}
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "4(x2)")
    assert processes.several_processes() == {}
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1(x8)")
    assert processes.several_processes() == {"local_device_ids": [0, 1, 2, 3]}
