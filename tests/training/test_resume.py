"""A run that was interrupted goes on as though it had not been; what may and what may not change meanwhile."""

import contextlib
import itertools
import os
import signal
from unittest import mock

import numpy as np
import pytest
from small_run import (
    BATCH,
    LENGTH,
    assert_same_state,
    checkpoint_steps,
    config_of,
    copy_run,
    make_data,
    metrics,
    run,
    saved_state,
)

from orthros_jax.config import ConfigError
from orthros_jax.data.loader import training_batches
from orthros_jax.errors import UserError
from orthros_jax.training import trainer

pytestmark = pytest.mark.usefixtures("compile_cache")


@contextlib.contextmanager
def _stopped_after(step):
    """SIGTERM arrives as the metrics of a step are shown."""

    class Progress(trainer.Progress):
        def update(self, number, *arguments, **keywords):
            super().update(number, *arguments, **keywords)
            if number == step:
                os.kill(os.getpid(), signal.SIGTERM)

    with mock.patch.object(trainer, "Progress", Progress):
        yield


def test_a_stopped_run_goes_on_to_the_bit(finished, data, tmp_path):
    config = config_of(tmp_path / "run", data)
    with _stopped_after(6):
        first = run(config)
    assert first.code == 0
    # The next step was under way already.
    assert f"Stopped by SIGTERM after step 7: the state is saved in {tmp_path / 'run'}; " in first.out
    assert checkpoint_steps(tmp_path / "run") == [4, 7]
    second = run(config)
    assert "Resuming at step 7\n" in second.out
    assert second.steps == finished.steps
    assert second.evaluations == finished.evaluations
    reference = config_of(finished.run_dir, data)
    assert_same_state(saved_state(config), saved_state(reference))


@pytest.mark.parametrize("last_checkpoint", [4, 8])
def test_a_killed_run_goes_on_to_the_bit(last_checkpoint, finished, data, tmp_path):
    """Lines of lost steps, and one torn by the kill, are replaced."""
    copy_run(finished.run_dir, tmp_path / "run", last_checkpoint)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "loss": 1.2')
    again = run(config_of(tmp_path / "run", data))
    assert f"Resuming at step {last_checkpoint}\n" in again.out
    order = [(line["step"], "loss" in line) for line in metrics(finished.run_dir)]
    assert [(line["step"], "loss" in line) for line in metrics(again.run_dir)] == order
    assert again.steps == finished.steps
    assert again.evaluations == finished.evaluations


def test_a_damaged_checkpoint_is_passed_over(finished, data, tmp_path):
    copy_run(finished.run_dir, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "12" / "_CHECKPOINT_METADATA").unlink()
    again = run(config_of(tmp_path / "run", data))
    assert f"skipped checkpoint {tmp_path / 'run' / 'checkpoints' / '12'}: it was never committed\n" in again.err
    assert "Resuming at step 8\n" in again.out
    assert checkpoint_steps(tmp_path / "run") == [4, 8, 12]
    assert again.steps == finished.steps


@pytest.mark.parametrize("name", ["4", "4.damaged"])
def test_a_run_without_a_readable_checkpoint_does_not_start_anew(name, finished, data, tmp_path):
    """Nobody's history is overwritten because of a disk that fails to read."""
    copy_run(finished.run_dir, tmp_path / "run", 4)
    folder = tmp_path / "run" / "checkpoints"
    (folder / "4" / "record" / "metadata").write_text("{")
    (folder / "4").rename(folder / name)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError) as error:
        run(config_of(tmp_path / "run", data))
    assert str(error.value) == (
        f"{folder}: no checkpoint can be read, of {name}; repair them, delete the folder to start this run anew, or "
        "start another with another run_dir"
    )
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_another_mesh_goes_on_to_float_tolerance(finished, data, tmp_path):
    """Steps 1-4 on data 8, 5-8 on fsdp 2 x tensor 2, 9-12 on one device."""
    changes = {"training__accumulation": 1}
    for steps, devices, mesh in [
        (4, 8, {}),
        (8, 8, {"mesh__fsdp": 2, "mesh__tensor": 2}),
        (12, 1, {}),
    ]:
        part = run(config_of(tmp_path / "run", data, training__steps=steps, **mesh, **changes), devices)
        assert part.code == 0
        assert ("data 8" if not mesh else "fsdp 2 x tensor 2") in part.out or devices == 1
    for name in ("loss", "grad_norm"):
        ours, reference = ([line[name] for line in lines] for lines in (part.steps, finished.steps))
        np.testing.assert_allclose(ours, reference, rtol=2e-3)
    assert [line["tokens"] for line in part.steps] == [line["tokens"] for line in finished.steps]


def test_more_steps_keep_the_schedule(data, tmp_path):
    """The length of the schedule is settled at the first start: 6 steps.

    12 are asked for after its end, and after a kill that left it at step 4.
    """
    changes = {"optimizer__schedule_steps": None, "evaluation__every": 100}
    short = run(config_of(tmp_path / "short", data, training__steps=6, **changes))
    first = short.steps
    copy_run(short.run_dir, tmp_path / "killed", last_checkpoint=4)
    final = "beyond it the learning rate stays at 0.002\n"
    rates = {}
    for name in ("short", "killed"):
        longer = run(config_of(tmp_path / name, data, **changes))
        assert f"Schedule ends at step 6, as at the run's first start; {final}" in longer.out
        assert "Changed  training.steps: 6 -> 12\n" in longer.out
        rates[name] = [line["learning_rate"] for line in longer.steps]
        assert longer.steps[:6] == first
    assert rates["short"] == rates["killed"]
    assert rates["short"][:6] == [line["learning_rate"] for line in first]
    np.testing.assert_allclose(rates["short"][6:], 2e-3, rtol=1e-6)
    jumps = np.abs(np.diff(rates["short"]))
    assert jumps[5:].max() <= jumps[:5].max()
    assert "Schedule" not in short.out


def _read_windows(read):
    """Training batches that leave a copy in `read`."""

    def batches(*arguments, **keywords):
        for batch in training_batches(*arguments, **keywords):
            read.append(batch["tokens"].copy())
            yield batch

    return mock.patch.object(trainer, "training_batches", batches)


def test_another_batch_size_goes_on_at_the_same_sample(finished, data, tmp_path):
    copy_run(finished.run_dir, tmp_path / "run", last_checkpoint=8)
    read = []
    with _read_windows(read):
        again = run(config_of(tmp_path / "run", data, training__batch_size=4, training__accumulation=1))
    config = config_of(tmp_path / "run", data)
    order = training_batches(config.data, batch_size=4, seed=config.training.seed)
    expected = list(itertools.islice(order, 20))[16:]
    order.close()
    assert len(read) == 4
    for ours, theirs in zip(read, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs["tokens"])
    assert [line["tokens"] // LENGTH for line in again.steps[8:]] == [8 * BATCH + 4 * i for i in (1, 2, 3, 4)]
    assert "Changed  training.batch_size: 8 -> 4\n" in again.out
    assert "Changed  training.accumulation: 2 -> 1\n" in again.out
    assert again.out.count("Changed") == 2


def test_settings_that_may_change_are_listed(finished, data, tmp_path):
    copy_run(finished.run_dir, tmp_path / "run")
    changes = {"optimizer__clip_norm": 0.5, "checkpoint__keep_every": 6, "evaluation__sample_prompt": "the"}
    again = run(config_of(tmp_path / "run", data, **changes))
    changed = [line for line in again.out.splitlines() if line.startswith("Changed")]
    assert changed == [
        "Changed  optimizer.clip_norm: 1.0 -> 0.5",
        "Changed  checkpoint.keep_every: null -> 6",
        "Changed  evaluation.sample_prompt:  -> the",
    ]


@pytest.mark.parametrize(
    ("changes", "key", "before", "after"),
    [
        ({"model__model_dim": 32}, "model.model_dim", "16", "32"),
        ({"model__num_layers": 3}, "model.num_layers", "2", "3"),
        ({"model__window": 7}, "model.window", "6", "7"),
        ({"model__output_window": 7}, "model.output_window", "null", "7"),
        ({"model__kind": "transformer"}, "model.kind", "orthros", "transformer"),
        ({"model__param_dtype": "bfloat16"}, "model.param_dtype", "float32", "bfloat16"),
        ({"training__seed": 1}, "training.seed", "0", "1"),
        ({"data__sequence_length": 16}, "data.sequence_length", "32", "16"),
        ({"data__shuffle": False}, "data.shuffle", "True", "False"),
        ({"data__weights": [1.0]}, "data.weights", "[]", "[1.0]"),
    ],
)
def test_settings_that_must_not_change(changes, key, before, after, finished, data):
    with pytest.raises(ConfigError) as caught:
        run(config_of(finished.run_dir, data, **changes))
    assert str(caught.value) == (
        f"{key}: {after} differs from {before}, with which the run in {finished.run_dir} was started; "
        f"keep {before}, or start a new run with another run_dir"
    )


def test_other_data_is_refused_and_moved_data_is_not(finished, data, tmp_path):
    other = make_data(tmp_path / "other", documents=400)
    before = metrics(finished.run_dir)
    with pytest.raises(ConfigError) as caught:
        run(config_of(finished.run_dir, other))
    assert str(caught.value) == (
        f"data.paths: holds other data than the run in {finished.run_dir} was started with; give it the same "
        "data sets in the same order, or start a new run with another run_dir"
    )
    assert metrics(finished.run_dir) == before
    moved = tmp_path / "moved"
    moved.symlink_to(data)
    copy_run(finished.run_dir, tmp_path / "run")
    assert run(config_of(tmp_path / "run", moved)).code == 0
