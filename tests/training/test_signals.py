"""SIGTERM and SIGINT at every stage of a run: it saves the last completed step, says so, and goes on from there."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from small_run import checkpoint_steps, config_of, copy_run, metrics, run
from stages import signals_at

from orthros_jax.config_reader import save_config

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("compile_cache")


def _stopped(by, step, run_dir):
    return f"Stopped by {by} after step {step}: the state is saved in {run_dir}; the same command goes on from there.\n"


def test_during_the_first_compilation(finished, data, tmp_path):
    config = config_of(tmp_path / "run", data)
    with signals_at("compiling", signal.SIGTERM) as stages:
        first = run(config)
    assert first.code == 0
    assert stages == ["compiling"]
    assert first.out.endswith(
        "Stopped by SIGTERM after step 0: there is nothing to save yet; the same command goes on from there.\n"
    )
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert metrics(tmp_path / "run") == []
    assert run(config).steps == finished.steps


def test_during_the_compilation_of_a_resumed_run(finished, data, tmp_path):
    copy_run(finished.run_dir, tmp_path / "run", last_checkpoint=8)
    config = config_of(tmp_path / "run", data)
    with signals_at("compiling", signal.SIGINT):
        first = run(config)
    assert first.code == 0
    assert first.out.endswith(_stopped("SIGINT", 8, tmp_path / "run"))
    assert checkpoint_steps(tmp_path / "run") == [4, 8]
    assert run(config).steps == finished.steps


def test_inside_an_evaluation(finished, data, tmp_path):
    """An evaluation of many batches ends with the batch under way, and is made up for."""
    config = config_of(tmp_path / "run", data, evaluation__every=4)
    whole = run(config_of(tmp_path / "whole", data, evaluation__every=4))
    with signals_at("evaluation after step 4, batch 3", signal.SIGTERM) as stages:
        first = run(config)
    assert first.code == 0
    assert stages == ["evaluation after step 4, batch 3", "saving step 4"]
    assert first.out.endswith(_stopped("SIGTERM", 4, tmp_path / "run"))
    assert checkpoint_steps(tmp_path / "run") == [4]
    assert first.evaluations == {}
    again = run(config)
    assert list(again.evaluations) == [4, 8, 12]
    assert again.evaluations == whole.evaluations
    assert again.steps == whole.steps


@pytest.mark.parametrize(
    "numbers", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT)]
)
def test_in_the_middle_of_a_step(numbers, finished, data, tmp_path):
    config = config_of(tmp_path / "run", data)
    with signals_at("step 7", *numbers) as stages:
        first = run(config)
    assert first.code == 0
    assert stages == ["step 7", "saving step 7"]
    assert first.out.endswith(_stopped(numbers[0].name, 7, tmp_path / "run"))
    assert [line["step"] for line in first.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert checkpoint_steps(tmp_path / "run") == [4, 7]
    assert run(config).steps == finished.steps


def test_during_the_final_evaluation(finished, data, tmp_path):
    config = config_of(tmp_path / "run", data)
    with signals_at("evaluation after step 12, batch 2", signal.SIGTERM):
        first = run(config)
    assert first.code == 0
    assert first.out.endswith(_stopped("SIGTERM", 12, tmp_path / "run"))
    assert checkpoint_steps(tmp_path / "run") == [4, 8, 12]
    again = run(config)
    assert "Complete: 12 steps" in again.out
    assert again.evaluations == finished.evaluations


def test_handlers_are_put_back(finished, data, tmp_path):
    copy_run(finished.run_dir, tmp_path / "run")
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    run(config_of(tmp_path / "run", data))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.slow
def test_a_real_process_stops_and_goes_on(data, tmp_path):
    """Twice SIGTERM as soon as the first step is shown, to `python train.py` itself."""
    config = config_of(tmp_path / "run", data, training__steps=100_000, checkpoint__every=100_000)
    save_config(config, tmp_path / "run.yaml")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "--config", str(tmp_path / "run.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    alarm = threading.Timer(180, process.kill)
    alarm.start()
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("step 1/100000 "):
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            break
    out, err = process.communicate()
    alarm.cancel()
    assert process.returncode == 0, "".join(seen) + err
    assert "\nSIGTERM received: saving a checkpoint and stopping\n" in err
    (step,) = checkpoint_steps(tmp_path / "run")
    assert step >= 1
    assert out.endswith(_stopped("SIGTERM", f"{step:,}", tmp_path / "run"))
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == list(range(1, step + 1))
