"""Where the time of a run goes: goodput, waiting for saves, restoring; and the memory that it says it needs."""

import re
import time
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from small_run import config_of, copy_run, metrics, run

from orthros_jax.data.loader import training_batches
from orthros_jax.training import goodput, report, trainer
from orthros_jax.training.checkpoint import Checkpoints
from orthros_jax.training.goodput import Goodput
from orthros_jax.training.memory import GIB, ProgramMemory, program_memory

pytestmark = pytest.mark.usefixtures("compile_cache")


def test_the_time_of_steps():
    """The first two steps overlap on the host, the third is skipped, the fourth is dispatched 2 s after its end."""
    with Goodput(started=100.0) as clock, mock.patch.object(goodput.time, "perf_counter", return_value=120.0):
        for dispatched, ended, is_useful in [(102, 105, True), (103, 106, True), (106, 108, False), (110, 111, True)]:
            clock.add(dispatched, ended, is_useful=is_useful)
        assert clock.steps == 4
        assert clock.useful_seconds == 3 + 1 + 1
        assert clock.share() == pytest.approx(5 / 20)


def test_a_step_ends_when_its_result_is_there():
    result = mock.Mock()
    result.block_until_ready.side_effect = lambda: time.sleep(0.1)
    before = time.perf_counter()
    with Goodput(0.0) as clock:
        end = clock.end_of(result)
        assert not end.done()
    assert before + 0.1 <= end.result() <= time.perf_counter()


def test_waiting_is_not_useful(finished, data, tmp_path):
    """0.1 s for each of 8 batches, 0.2 s for the save of step 8 and the last one."""
    copy_run(finished.run_dir, tmp_path / "run", last_checkpoint=4)

    def slow_batches(*arguments, **keywords):
        for batch in training_batches(*arguments, **keywords):
            time.sleep(0.1)
            yield batch

    class SlowCheckpoints(Checkpoints):
        def save(self, *arguments, **keywords):
            time.sleep(0.2)
            return super().save(*arguments, **keywords)

    with (
        mock.patch.object(trainer, "training_batches", slow_batches),
        mock.patch.object(trainer, "Checkpoints", SlowCheckpoints),
        mock.patch.object(trainer, "peak_device_bytes", return_value=3 * GIB // 2),
    ):
        again = run(config_of(tmp_path / "run", data))
    before, lines = {}, {}
    for line in metrics(tmp_path / "run"):
        if "loss" in line:
            (before if line["step"] <= 4 else lines)[line["step"]] = line
    found = re.search(
        r"Goodput  ([\d.]+)%: ([\d.]+) s of steps in ([\d.]+) s since the start; ([\d.]+) s waited", again.out
    )
    assert found is not None
    share, useful, wall, saving = map(float, found.groups())
    assert useful < 0.4
    assert wall > 0.8 + 0.4
    assert saving >= 0.4
    assert share == pytest.approx(100 * lines[12]["goodput"], abs=10)
    assert 0 < lines[12]["goodput"] < 0.4
    assert [step for step, line in lines.items() if line["save_seconds"] >= 0.2] == [9]
    assert {line["restore_seconds"] for line in before.values()} == {None}
    (restore_seconds,) = {line["restore_seconds"] for line in lines.values()}
    assert restore_seconds > 0
    assert f"Restored in {restore_seconds:.1f} s\nResuming at step 4\n" in again.out
    assert {line["peak_memory_gib"] for line in lines.values()} == {1.5}
    assert {line["peak_memory_gib"] for line in before.values()} == {None}


def test_the_memory_of_a_program(finished):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    memory = program_memory(jax.jit(lambda x: x @ x, donate_argnums=0).lower(x).compile())
    assert memory is not None
    assert memory.arguments == 64 * 64 * 4
    assert memory.arguments <= memory.total <= memory.arguments + memory.temporaries + 64 * 64 * 4
    text = report.memory(ProgramMemory(GIB, 2 * GIB, 3 * GIB), 4 * GIB)
    assert text == "Memory   3.00 of 4.00 GiB a device during a step: state and batch 1.00, temporaries 2.00"
    assert report.memory(ProgramMemory(GIB, 2 * GIB, 3 * GIB), None).startswith("Memory   3.00 GiB a device during")
    assert finished.out.count("Memory   ") == 1
