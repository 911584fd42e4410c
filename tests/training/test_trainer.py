"""Whole runs: what they report, save and evaluate, and what they do about steps that are not finite."""

import dataclasses
import itertools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small_run import (
    BATCH,
    LENGTH,
    assert_same_state,
    checkpoint_steps,
    config_of,
    copy_run,
    metrics,
    poisoned,
    run,
    saved_state,
)

from orthros_jax import streams
from orthros_jax.config_reader import load_config, read_config
from orthros_jax.data.dataset import TokenDataset
from orthros_jax.data.loader import training_batches
from orthros_jax.training import trainer
from orthros_jax.training.schedule import learning_rate_schedule
from orthros_jax.training.step import make_program

pytestmark = pytest.mark.usefixtures("compile_cache")

STEP_KEYS = [
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "tokens_per_second",
    "step_seconds",
    "data_wait_seconds",
    "save_seconds",
    "restore_seconds",
    "goodput",
    "peak_memory_gib",
    "mfu",
    "flops",
    "skipped_steps",
    "documents_per_window",
]


def test_the_loss_falls(finished):
    losses = [line["loss"] for line in finished.steps]
    assert losses[0] == pytest.approx(math.log(260), rel=0.05)
    assert np.mean(losses[-3:]) < losses[0] - 1


def test_every_step_is_reported_once_with_all_numbers(finished):
    lines = metrics(finished.run_dir)
    assert [(line["step"], "loss" in line) for line in lines] == [
        *((step, True) for step in range(1, 6)),
        (5, False),
        *((step, True) for step in range(6, 11)),
        (10, False),
        (11, True),
        (12, True),
        (12, False),
    ]
    for line in lines:
        assert list(line) == (STEP_KEYS if "loss" in line else ["step", "eval_loss", "eval_bits_per_byte"])


def test_numbers_of_a_step(finished, data):
    rate = learning_rate_schedule(load_config(finished.run_dir / "config.yaml").optimizer, 12)
    lines = metrics(finished.run_dir)
    steps = [line for line in lines if "loss" in line]
    for line in steps:
        assert line["learning_rate"] == pytest.approx(float(rate(line["step"] - 1)), rel=1e-6)
        assert line["tokens"] == line["step"] * BATCH * LENGTH
        assert line["tokens_per_second"] == pytest.approx(BATCH * LENGTH / line["step_seconds"])
        assert line["data_wait_seconds"] > 0
        assert line["mfu"] is None
        assert line["skipped_steps"] == 0
        assert line["grad_norm"] > 0
    assert all(a["flops"] < b["flops"] for a, b in itertools.pairwise(steps))


def test_documents_per_window_are_counted(finished, data):
    windows = TokenDataset(data, "train", LENGTH)
    mean = np.mean([windows[i]["segment_ids"].max() for i in range(len(windows))])
    assert mean > 1.5
    assert f"windows of 32, {mean:.2f} documents in each" in finished.out
    reported = np.mean([line["documents_per_window"] for line in finished.steps])
    assert reported == pytest.approx(mean, rel=0.15)


def test_checkpoints_and_words_of_a_run(finished):
    assert finished.code == 0
    assert checkpoint_steps(finished.run_dir) == [4, 8, 12]
    last = finished.evaluations[12]
    bits = f"{last['eval_bits_per_byte']:.3f} bits per byte"
    assert f"Step 12: held-out loss {last['eval_loss']:.4f} ({bits}), " in finished.out
    assert finished.out.endswith(
        f"Complete: 12 steps in {finished.run_dir}.\n"
        f"Held-out loss {last['eval_loss']:.4f} nats per token, {bits}.\n"
        "Next:\n"
        "  go on      train --training.steps 24\n"
        "             (from step 12; the learning rate stays at its final value once its schedule has "
        "ended)\n"
        "  anew       give another --run_dir, with --training.steps for a longer schedule\n"
        f"  plot       python -m orthros_jax plot {finished.run_dir}\n"
    )
    assert "step 12/12 loss " in finished.err


def _window_losses(config, params, windows):
    """Loss of every label of some windows, [B, T] float64, 0 where the next token is of another document."""
    program = make_program(config, 1)

    @jax.jit
    def logits(params, tokens, segment_ids):
        layout, _ = streams.pretraining(tokens, segment_ids)
        model = nnx.merge(program.graph, params)
        return model.logits(model(layout))

    scores = np.asarray(logits(params, windows["tokens"], windows["segment_ids"]), np.float64)
    tokens, segments = windows["tokens"], windows["segment_ids"]
    largest = scores.max(-1, keepdims=True)
    log_normaliser = np.log(np.exp(scores - largest).sum(-1)) + largest[..., 0]
    label_scores = np.take_along_axis(scores, tokens[:, 1:, None], -1)[..., 0]
    counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return np.where(counts, log_normaliser - label_scores, 0), counts


def _stack(dataset, numbers):
    rows = [dataset[number] for number in numbers]
    return {name: np.stack([row[name] for row in rows]) for name in ("tokens", "segment_ids")}


@pytest.fixture(scope="module")
def held_out_loss(finished, data):
    """Mean loss over all held-out labels, bits per byte and number of labels, without the project's loss."""
    config = load_config(finished.run_dir / "config.yaml")
    dataset = TokenDataset(data, "heldout", LENGTH)
    assert dataset[len(dataset) - 1]["segment_ids"][-1] == 0, "the last window should be padded"
    losses, counts = _window_losses(config, saved_state(config).ema, _stack(dataset, range(len(dataset))))
    assert counts.sum(1).std() > 0.5, "windows should weigh differently"
    return losses.sum() / counts.sum(), losses.sum() / math.log(2) / dataset.text_bytes, counts.sum()


def test_evaluation_is_the_mean_over_all_held_out_tokens(finished, held_out_loss):
    loss, bits, tokens = held_out_loss
    reported = finished.evaluations[12]
    assert reported["eval_loss"] == pytest.approx(loss, rel=2e-6)
    assert reported["eval_bits_per_byte"] == pytest.approx(bits, rel=2e-6)
    assert f"bits per byte), {tokens:,} tokens" in finished.out


def test_evaluation_uses_the_average_of_the_parameters(finished, held_out_loss, data):
    config = load_config(finished.run_dir / "config.yaml")
    dataset = TokenDataset(data, "heldout", LENGTH)
    params = saved_state(config).params
    losses, counts = _window_losses(config, params, _stack(dataset, range(len(dataset))))
    assert abs(losses.sum() / counts.sum() - held_out_loss[0]) > 1e-3


@pytest.mark.parametrize(("batch_size", "devices"), [(3, 1), (22, 1), (8, 8), (24, 8)])
def test_a_missed_evaluation_is_made_up_for_with_the_same_result(
    batch_size, devices, finished, held_out_loss, data, tmp_path
):
    """As after a kill between a save and its evaluation; batches and devices cut the split otherwise."""
    copy_run(finished.run_dir, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert "eval_loss" in lines[-1]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:-1]))
    changes = {"training__batch_size": batch_size, "training__accumulation": 1}
    again = run(config_of(tmp_path / "run", data, **changes), devices)
    assert again.code == 0
    assert again.evaluations[12]["eval_loss"] == pytest.approx(held_out_loss[0], rel=2e-6)
    assert f" {held_out_loss[2]:,} tokens" in again.out
    assert again.steps == finished.steps


def test_an_evaluation_in_the_middle_is_made_up_for(finished, data, tmp_path):
    """Saved at step 4 and killed before the evaluation of that step."""
    config = config_of(tmp_path / "run", data, evaluation__every=4)
    whole = run(config)
    copy_run(whole.run_dir, tmp_path / "killed", last_checkpoint=4)
    lines = (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert "eval_loss" in lines[4]
    (tmp_path / "killed" / "metrics.jsonl").write_text("".join(lines[:4]))
    again = run(dataclasses.replace(config, run_dir=str(tmp_path / "killed")))
    assert list(again.evaluations) == [4, 8, 12]
    assert again.evaluations == whole.evaluations


def test_running_a_finished_run_again_rewrites_nothing(finished, data, tmp_path):
    copy_run(finished.run_dir, tmp_path / "run")

    def files():
        found = (p for p in (tmp_path / "run" / "checkpoints").rglob("*") if p.is_file())
        return {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in found}

    before, lines = files(), metrics(tmp_path / "run")
    again = run(config_of(tmp_path / "run", data))
    assert again.code == 0
    assert files() == before
    assert metrics(tmp_path / "run") == lines
    assert "Resuming at step 12\n" in again.out
    assert f"\nComplete: 12 steps in {tmp_path / 'run'}.\nHeld-out loss " in again.out
    fewer = run(config_of(tmp_path / "run", data, training__steps=6))
    assert fewer.code == 0
    assert files() == before
    assert metrics(tmp_path / "run") == lines
    assert f"\nComplete: 12 steps in {tmp_path / 'run'}.\n" in fewer.out


@pytest.mark.parametrize(("steps", "every", "saved"), [(7, 10, [7]), (8, 4, [4, 8]), (2, 1, [1, 2])])
def test_the_last_state_is_saved_once(steps, every, saved, data, tmp_path):
    short = run(config_of(tmp_path / "run", data, training__steps=steps, checkpoint__every=every))
    assert short.code == 0
    assert checkpoint_steps(short.run_dir) == saved
    assert list(short.evaluations) == [step for step in (5,) if step < steps] + [steps]


def test_retention(data, tmp_path):
    changes = {"checkpoint__every": 2, "checkpoint__keep_last": 2, "checkpoint__keep_every": 6}
    short = run(config_of(tmp_path / "run", data, **changes))
    assert checkpoint_steps(short.run_dir) == [6, 10, 12]


def test_reports_of_several_steps(finished, data, tmp_path):
    """metrics.every = 5: the loss of every fifth step and of the last; MFU by the peak that is given."""
    changes = {"metrics__every": 5, "metrics__peak_tflops": 2.0}
    sparse = run(config_of(tmp_path / "run", data, **changes))
    lines = [line for line in metrics(sparse.run_dir) if "loss" in line]
    assert [line["step"] for line in lines] == [5, 10, 12]
    every = {line["step"]: line for line in finished.steps}
    flops, before = 0.0, 0
    for line in lines:
        step = line["step"]
        for name in ("loss", "grad_norm", "learning_rate", "tokens", "flops"):
            assert line[name] == every[step][name]
        documents = [every[s]["documents_per_window"] for s in range(before + 1, step + 1)]
        assert line["documents_per_window"] == pytest.approx(np.mean(documents))
        seconds = line["step_seconds"] * (step - before)
        assert line["mfu"] == pytest.approx((line["flops"] - flops) / seconds / 2e12)
        flops, before = line["flops"], step
    assert "peak of this device: 2 TFLOP/s\n" in sparse.out


def test_accumulation_changes_no_loss(finished, data, tmp_path):
    whole = run(config_of(tmp_path / "run", data, training__accumulation=1))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(
            [line[name] for line in whole.steps], [line[name] for line in finished.steps], rtol=1e-3
        )


@pytest.mark.parametrize("kind", ["transformer", "sliding_window"])
def test_baselines_train_with_the_same_settings(kind, finished, data, tmp_path):
    config_file = tmp_path / "run.yaml"
    config = config_of(tmp_path / "{model.kind}", data, training__steps=4)
    trainer.save_config(config, config_file)
    config = read_config(["--config", str(config_file), "--model.kind", kind])
    assert config.run_dir == str(tmp_path / kind)
    baseline = run(config)
    assert baseline.code == 0
    assert checkpoint_steps(tmp_path / kind) == [4]
    losses = [line["loss"] for line in baseline.steps]
    assert losses[-1] < losses[0]
    assert losses[1:] != [line["loss"] for line in finished.steps[1:4]]
    name = {"transformer": "Transformer", "sliding_window": "sliding-window Transformer"}[kind]
    assert baseline.out.startswith(f"Model    {name}, ")


def test_z_loss_moves_the_parameters_and_is_not_in_the_reported_loss(finished, data, tmp_path):
    heavy = run(config_of(tmp_path / "run", data, training__z_loss=0.1, training__steps=2))
    assert heavy.steps[0]["loss"] == pytest.approx(finished.steps[0]["loss"], rel=1e-5)
    assert heavy.steps[0]["grad_norm"] != pytest.approx(finished.steps[0]["grad_norm"], rel=1e-2)


def test_the_mask_keeps_documents_apart(finished, data):
    """The same labels cost something else where a window is read as one document."""
    config = load_config(finished.run_dir / "config.yaml")
    params = saved_state(config).params
    windows = _stack(TokenDataset(data, "train", LENGTH), range(8))
    first = windows["segment_ids"][:, 1:] == 1
    masked, counts = _window_losses(config, params, windows)
    ones = {**windows, "segment_ids": np.ones_like(windows["segment_ids"])}
    unmasked, _ = _window_losses(config, params, ones)
    np.testing.assert_allclose(masked[first & counts], unmasked[first & counts], rtol=1e-5)
    later = ~first & counts
    assert later.sum() > 50
    assert np.abs(masked - unmasked)[later].mean() > 1e-2
    # And the run's own loss is the masked one.
    batch = {name: jnp.asarray(rows) for name, rows in windows.items()}
    sums = jax.jit(make_program(config, 1).eval_step)(params, batch)
    np.testing.assert_allclose(sums.cross_entropy, masked.sum(), rtol=1e-5)


def test_steps_that_are_not_finite_are_skipped(data, tmp_path):
    """Batches 3 and 4 are bad, so step 4, at which a checkpoint is due, is made from batch 5."""
    config = config_of(tmp_path / "skipping", data, training__steps=8, evaluation__every=100)
    with poisoned(lambda number: number in (3, 4)):
        skipping = run(config)
    assert skipping.code == 0
    assert "Step 4 skipped: loss nan, gradient norm nan (1 in a row, 1 in all)\n" in skipping.out
    assert "Step 4 skipped: loss nan, gradient norm nan (2 in a row, 2 in all)\n" in skipping.out
    assert skipping.out.count("skipped:") == 2
    lines = skipping.steps
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["skipped_steps"] for line in lines] == [0, 0, 0, 2, 2, 2, 2, 2]
    assert [line["tokens"] // (BATCH * LENGTH) for line in lines] == [1, 2, 3, 6, 7, 8, 9, 10]
    assert checkpoint_steps(skipping.run_dir) == [4, 8]

    # The steps are those of a run that never saw the two batches.
    def without(*arguments, **keywords):
        loaded = training_batches(*arguments, **keywords)
        return (batch for number, batch in enumerate(loaded) if number not in (3, 4))

    clean_config = config_of(tmp_path / "clean", data, training__steps=8, evaluation__every=100)
    with poisoned(lambda _: False), mock.patch.object(trainer, "training_batches", without):
        clean = run(clean_config)
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [line[name] for line in lines] == [line[name] for line in clean.steps]
    a, b = saved_state(config), saved_state(clean_config)
    assert (a.step, a.samples, a.skipped, a.skipped_in_a_row) == (8, 10 * BATCH, 2, 0)
    assert_same_state(dataclasses.replace(a, samples=b.samples, skipped=b.skipped), b)

    # A kill after step 4 changes nothing: the cursor stands behind the bad batches.
    copy_run(skipping.run_dir, tmp_path / "killed", last_checkpoint=4)
    with poisoned(lambda number: number in (3, 4)):
        killed = run(dataclasses.replace(config, run_dir=str(tmp_path / "killed")))
    assert killed.steps == lines


def test_too_many_skipped_steps_end_the_run(data, tmp_path):
    config = config_of(tmp_path / "run", data, training__max_skipped_steps=3)
    with poisoned(lambda number: number >= 5):
        diverged = run(config)
    assert diverged.code == 1
    assert diverged.err.endswith(
        "train.py: error: step 6 was not finite 3 times in a row (loss nan, gradient norm nan); "
        "the newest checkpoint is step 4. Lower optimizer.learning_rate or look at the data\n"
    )
    assert "Complete" not in diverged.out
    assert [line["step"] for line in diverged.steps] == [1, 2, 3, 4, 5]
    assert checkpoint_steps(diverged.run_dir) == [4]
    state = saved_state(config)
    assert (state.step, state.skipped) == (4, 0)
    state.params["embedding"]["kernel"][259] = 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    assert optax.tree.norm(optax.tree.get(state.opt_state, "mu")) > 0


def test_a_run_that_never_has_a_finite_step_saves_nothing(data, tmp_path):
    config = config_of(tmp_path / "run", data, training__max_skipped_steps=2)
    with poisoned(lambda _: True):
        diverged = run(config)
    assert diverged.code == 1
    assert diverged.err.endswith(
        "train.py: error: step 1 was not finite 2 times in a row (loss nan, gradient norm nan); "
        "no checkpoint was saved. Lower optimizer.learning_rate or look at the data\n"
    )
    assert not (tmp_path / "run" / "checkpoints").exists()
