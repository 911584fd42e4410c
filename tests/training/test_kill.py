"""A run that is killed again and again ends with the bits of one that is not."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_run import TIMES, config_of, make_data

from orthros_jax.config_reader import save_config

ROOT = Path(__file__).parents[2]
KILLS = 10


def _start(config_file, log):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(config_file)]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def _lines(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def _stage(log: bytes) -> str:
    """How far a process came, for the record."""
    if b"Step " in log or b"step " in log:
        return "stepping, saving or evaluating"
    return "compiling" if b"MFU " in log else "starting"


@pytest.mark.slow
def test_ten_kills_change_no_bit(tmp_path):
    """Moments are drawn over the wall time of a whole run, start-up and compilation included.

    A kill loses the steps since the last save, so each start is given what is left of a whole run's time: a moment is
    drawn from it, and where the process ends before, the run is complete and starts anew in another folder.
    """
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the kills: {seed}")
    draw = random.Random(seed)
    data = make_data(tmp_path / "data")
    changes = {
        "training__steps": 60,
        "checkpoint__every": 3,
        "checkpoint__keep_last": 2,
        "evaluation__every": 4,
        "metrics__tensorboard": True,
    }

    def settings(name):
        config = config_of(tmp_path / name, data, **changes)
        save_config(config, tmp_path / f"{name}.yaml")
        return tmp_path / f"{name}.yaml"

    with (tmp_path / "whole.log").open("wb") as log:
        started = time.monotonic()
        assert _start(settings("whole"), log).wait(240) == 0, (tmp_path / "whole.log").read_text()
        whole_seconds = time.monotonic() - started
    expected = _lines(tmp_path / "whole")
    assert [line["step"] for line in expected if "loss" in line] == list(range(1, 61))

    kills, run_number, record = 0, 0, []
    while kills < KILLS or not record[-1].startswith("complete"):
        name = f"killed-{run_number}"
        log_file = tmp_path / f"{name}.log"
        moment = draw.uniform(0, whole_seconds) if kills < KILLS else 240.0
        with log_file.open("wb") as log:
            process = _start(settings(name), log)
            try:
                code = process.wait(moment)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                kills += 1
                record.append(f"killed after {moment:.1f} s: {_stage(log_file.read_bytes())}")
                continue
        assert code == 0, log_file.read_text()
        record.append(f"complete within {moment:.1f} s")
        assert _lines(tmp_path / name) == expected
        run_number += 1
    print(f"a whole run takes {whole_seconds:.1f} s", *record, sep="\n")
    assert sum(line.startswith("killed") for line in record) == KILLS
