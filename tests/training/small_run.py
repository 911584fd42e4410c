"""Whole runs of a small model in this process, for the end-to-end tests of training."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from settings import make_config

from benchmarks.soak import TIMES
from orthros_jax.config import Config
from orthros_jax.data.loader import training_batches
from orthros_jax.data.prepare import prepare
from orthros_jax.sharding import build_mesh, state_shardings
from orthros_jax.training import trainer
from orthros_jax.training.checkpoint import Checkpoints, read_metadata
from orthros_jax.training.metrics import read_metrics
from orthros_jax.training.step import TrainState, make_program

LENGTH = 32
BATCH = 8
SETTINGS: dict[str, Any] = {
    "model.vocab_size": 260,
    "model.num_layers": 2,
    "model.model_dim": 16,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.ffn_dim": 24,
    "model.window": 6,
    "model.compute_dtype": "float32",
    "model.init_std": 0.1,
    "model.max_sequence_length": 64,
    "data.sequence_length": LENGTH,
    "data.prefetch": 2,
    "optimizer.learning_rate": 2e-2,
    "optimizer.schedule_steps": 12,
    "optimizer.warmup_steps": 2,
    "optimizer.ema_decay": 0.5,
    "training.steps": 12,
    "training.batch_size": BATCH,
    "training.accumulation": 2,
    "training.z_loss": 1e-4,
    "checkpoint.every": 4,
    "checkpoint.keep_last": 9,
    "evaluation.every": 5,
    "metrics.tensorboard": False,
}


class Finished(NamedTuple):
    """A run that has returned: exit code, run folder, standard output and standard error."""

    code: int
    run_dir: Path
    out: str
    err: str

    @property
    def steps(self) -> list[dict]:
        """Lines of metrics.jsonl with the numbers of a step, times left out."""
        lines = (line for line in metrics(self.run_dir) if "loss" in line)
        return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]

    @property
    def evaluations(self) -> dict[int, dict]:
        return {line["step"]: line for line in metrics(self.run_dir) if "eval_loss" in line}


def metrics(run_dir: Path) -> list[dict]:
    return read_metrics(run_dir / "metrics.jsonl")


def write_text(path: Path, documents: int = 500, seed: int = 0) -> Path:
    """A JSONL file of short sentences over a few words, several of them to a window."""
    random = np.random.default_rng(seed)
    words = ["the", "dog", "has", "two", "heads", "and", "one", "tail", "it", "sees", "far"]
    with path.open("w") as file:
        for number in range(documents):
            text = " ".join(random.choice(words, random.integers(1, 9)))
            file.write(json.dumps({"text": f"{number} {text}."}) + "\n")
    return path


def make_data(folder: Path, **text) -> Path:
    """A prepared data set of byte tokens, with about a seventh of the documents held out."""
    source = write_text(folder.with_suffix(".jsonl"), **text)
    prepare([str(source)], folder, holdout=0.15, workers=1, progress=False)
    return folder


def config_of(run_dir: Path | str, data: Path, **changes: Any) -> Config:
    """The small configuration; changes are written `section__name`."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return make_config(SETTINGS | {"run_dir": str(run_dir), "data.paths": [str(data)]} | named)


@contextlib.contextmanager
def on_devices(count: int) -> Iterator[None]:
    """Training sees only the first `count` devices."""

    def build(config):
        return build_mesh(config, jax.devices()[:count])

    with mock.patch.object(trainer, "build_mesh", build):
        yield


def run(config: Config, devices: int = 1) -> Finished:
    """Trains, on one device unless told otherwise."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), on_devices(devices):
        code = trainer.train(config, command="train")
    return Finished(code, Path(config.run_dir), out.getvalue(), err.getvalue())


@contextlib.contextmanager
def poisoned(is_bad: Callable[[int], bool]) -> Iterator[None]:
    """Puts token 259, which has a NaN embedding and which no text holds, into the batches that are bad.

    Batches are numbered from the start of the run.
    """

    def make(config, schedule_steps):
        program = make_program(config, schedule_steps)

        def init(key):
            state = program.init(key)
            kernel = state.params["embedding"]["kernel"]
            state.params["embedding"]["kernel"] = kernel.at[259].set(jnp.nan)
            return state

        return program._replace(init=init)

    def batches(*arguments, start_sample, **keywords):
        loaded = training_batches(*arguments, start_sample=start_sample, **keywords)
        for number, batch in enumerate(loaded, start_sample // BATCH):
            if is_bad(number):
                batch["tokens"][2, 3] = 259
            yield batch

    with (
        mock.patch.object(trainer, "make_program", make),
        mock.patch.object(trainer, "training_batches", batches),
    ):
        yield


def copy_run(run_dir: Path, to: Path, last_checkpoint: int | None = None) -> Path:
    """Copies a run folder; later checkpoints are left out, as though it was killed before their saves."""
    shutil.copytree(run_dir, to)
    for step in checkpoint_steps(to):
        if last_checkpoint is not None and step > last_checkpoint:
            shutil.rmtree(to / "checkpoints" / str(step))
    return to


def checkpoint_steps(run_dir: Path) -> list[int]:
    return sorted(int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdecimal())


def saved_state(config: Config) -> TrainState:
    """The newest checkpoint of a run, as NumPy arrays."""
    program = make_program(config, 1)
    abstract = jax.eval_shape(program.init, jax.random.key(0))
    shardings = state_shardings(abstract, build_mesh(config.mesh, jax.devices()[:1]))
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)
    checkpoints = Checkpoints(Path(config.run_dir) / "checkpoints", keep_last=1, keep_every=None)
    restored = checkpoints.restore(target)
    assert restored is not None
    newest = read_metadata(checkpoints.directory)
    assert newest is not None
    assert restored.step == newest[0]
    return jax.tree.map(np.array, jax.device_get(restored.state))


def assert_same_state(a: TrainState, b: TrainState) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)
