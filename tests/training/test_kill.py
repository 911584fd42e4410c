"""A run that is killed again and again ends with the bits of one that is not."""

import random

import pytest
from small_run import config_of, make_data

from benchmarks import soak
from orthros_jax.config_reader import save_config

KILLS = 10


@pytest.mark.slow
def test_ten_kills_change_no_bit(tmp_path):
    """Moments are drawn over the wall time of a whole run, start-up included; most programs come from the cache."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the kills: {seed}")
    data = make_data(tmp_path / "data")
    changes = {
        "training__steps": 60,
        "checkpoint__every": 3,
        "checkpoint__keep_last": 2,
        "evaluation__every": 4,
        "metrics__tensorboard": True,
        "training__compile_cache": str(tmp_path / "compiled"),
    }

    def command(name):
        save_config(config_of(tmp_path / name, data, **changes), tmp_path / f"{name}.yaml")
        return ["--config", str(tmp_path / f"{name}.yaml")]

    # Most of the time is compilation.
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    found = soak.soak(
        command, tmp_path, seed, enough=lambda kills: kills >= KILLS, environment=environment, report=print
    )
    assert found.kills.total() == KILLS
    assert found.runs >= 1
    assert [line["step"] for line in soak.numbers(tmp_path / "whole") if "loss" in line] == list(range(1, 61))


def test_differences_are_found():
    """What the comparison of a soak must not pass over."""
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    soak.compare(lines, list(lines), "run")
    for wrong in (lines[:1], [*lines, lines[1]], [lines[0], {"step": 2, "loss": 1.0000000000000002}]):
        with pytest.raises(soak.SoakFailed, match="run "):
            soak.compare(wrong, lines, "run")


def test_leftovers_are_found(tmp_path):
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    soak.require_clean(tmp_path)
    (tmp_path / "checkpoints" / "6.orbax-checkpoint-tmp-1").mkdir()
    with pytest.raises(soak.SoakFailed, match=r"has left .*/6\.orbax"):
        soak.require_clean(tmp_path)
