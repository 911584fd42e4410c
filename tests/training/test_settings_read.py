"""No setting without a reader: each one changes what is compiled, what is written, what is printed, or is refused."""

import json
import re
import types
from unittest import mock

import jax
import numpy as np
import pytest
import settings
from small_run import checkpoint_steps, config_of, make_data, poisoned, run

from orthros_jax.config import Config, ConfigError
from orthros_jax.data import loader
from orthros_jax.data.prepare import prepare_if_missing
from orthros_jax.sharding import build_mesh
from orthros_jax.training import trainer
from orthros_jax.training.step import make_program

pytestmark = pytest.mark.usefixtures("compile_cache")

# Read where the program is made: each changes a jaxpr.
COMPILED = [
    name
    for name in settings.PERTURBED
    if name.startswith(("model.", "optimizer.")) and name not in ("model.max_sequence_length", "model.attention_impl")
] + ["training.accumulation", "training.z_loss", "training.output_fraction"]
# Each changes the first batch.
READ = ["data.sequence_length", "data.shuffle", "training.batch_size", "training.seed"]
# Each changes what a short run leaves or prints.
RUN = [
    "training.steps",
    "training.profile_steps",
    "checkpoint.every",
    "checkpoint.keep_last",
    "checkpoint.keep_every",
    "evaluation.every",
    "evaluation.sample_prompt",
    "evaluation.sample_tokens",
    "metrics.every",
    "metrics.tensorboard",
    "metrics.progress",
    "metrics.peak_tflops",
]
MESH = ["mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.context"]
# A test of its own for each of these, at the end.
OTHERS = [
    "run_dir",
    "model.attention_impl",
    "model.max_sequence_length",
    "data.paths",
    "data.weights",
    "data.source",
    "data.tokenizer",
    "data.prefetch",
    "training.max_skipped_steps",
    "training.watchdog_seconds",
    "training.compile_cache",
    "metrics.wandb",
    "metrics.wandb_project",
]


def test_every_setting_is_in_one_list():
    listed = COMPILED + READ + RUN + MESH + OTHERS
    assert len(set(listed)) == len(listed)
    assert set(listed) == set(settings.PERTURBED) == set(settings.leaves(Config()))


def _text(closed) -> str:
    return f"{closed.jaxpr} {[np.asarray(const).tobytes() for const in closed.consts]}"


def _programs(changes):
    """What initialises and what makes a step, one after the other, for a changed small configuration."""
    config = settings.make_config(settings.BASE | changes)
    program = make_program(config, config.training.steps)
    key = jax.random.key(0)
    state = jax.eval_shape(program.init, key)
    rows = jax.ShapeDtypeStruct((8, config.data.sequence_length + 1), np.int32)
    yield _text(jax.make_jaxpr(program.train_step)(state, {"tokens": rows, "segment_ids": rows}))
    yield _text(jax.make_jaxpr(program.init)(key))


@pytest.fixture(scope="module")
def base_programs():
    return list(_programs({}))


def test_the_same_settings_give_the_same_program(base_programs):
    assert list(_programs({})) == base_programs


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name, base_programs):
    changed = _programs({name: settings.PERTURBED[name]})
    assert any(ours != base for ours, base in zip(changed, base_programs, strict=True))


def _first_batch(data, **changes):
    config = config_of("unused", data, **changes)
    size, seed = config.training.batch_size, config.training.seed
    batches = loader.training_batches(config.data, batch_size=size, seed=seed)
    first = next(batches)["tokens"]
    batches.close()
    return first


@pytest.mark.parametrize("name", READ)
def test_read(name, data):
    changed = _first_batch(data, **{name: settings.PERTURBED[name]})
    assert not np.array_equal(changed, _first_batch(data))


_SHORT = {
    "training.steps": 5,
    "checkpoint.every": 2,
    "checkpoint.keep_last": 2,
    "evaluation.every": 2,
    "evaluation.sample_prompt": "a",
    "evaluation.sample_tokens": 4,
    "metrics.tensorboard": True,
}


def _observed(run_dir, data, changes):
    """What a short run leaves and prints, without what differs each time."""
    finished = run(config_of(run_dir, data, **_SHORT | changes))
    assert finished.code == 0
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    reported = [{"step": line["step"], "mfu": line.get("mfu") is None, "keys": list(line)} for line in lines]
    words = finished.out.replace(str(run_dir), "RUN")
    # A process shows the choice of a kernel once, whatever the number of its runs.
    words = re.sub(r"Goodput .*\n", "", words)
    shown = re.sub(r"Kernel .*\n|[\d.]+k? tokens/s .*", "", finished.err)
    return checkpoint_steps(run_dir), (run_dir / "tensorboard").exists(), reported, words, shown


@pytest.fixture(scope="module")
def base_run(data, tmp_path_factory):
    return _observed(tmp_path_factory.mktemp("base") / "run", data, {})


def test_the_same_settings_give_the_same_run(base_run, data, tmp_path):
    assert _observed(tmp_path / "run", data, {}) == base_run


@pytest.mark.parametrize("name", RUN)
def test_run(name, base_run, data, tmp_path):
    assert _observed(tmp_path / "run", data, {name: settings.PERTURBED[name]}) != base_run


@pytest.mark.parametrize("name", MESH)
def test_mesh(name):
    config = settings.make_config(settings.BASE)
    if name == "mesh.data":
        with pytest.raises(ConfigError, match="does not make the 8 devices"):
            build_mesh(settings.make_config(settings.BASE | {name: settings.PERTURBED[name]}).mesh)
        return
    changed = settings.make_config(settings.BASE | {name: settings.PERTURBED[name]})
    assert build_mesh(changed.mesh).shape != build_mesh(config.mesh).shape


def test_run_dir(data, tmp_path):
    for name in ("a", "b"):
        run(config_of(tmp_path / name, data, training__steps=1))
        assert checkpoint_steps(tmp_path / name) == [1]


def test_attention_impl():
    """`xla` is what `auto` takes on a CPU; what a CPU lacks is refused."""
    with pytest.raises(NotImplementedError, match="impl='cudnn' is not possible here"):
        next(_programs({"model.attention_impl": "cudnn"}))


def test_max_sequence_length():
    with pytest.raises(ConfigError, match=r"longer than model\.max_sequence_length 16"):
        settings.make_config(settings.BASE | {"model.max_sequence_length": 16})


def test_paths_and_weights(data, tmp_path):
    other = make_data(tmp_path / "other", documents=300, seed=1)
    assert not np.array_equal(_first_batch(other), _first_batch(data))
    paths = [str(data), str(other)]
    weighted = [_first_batch(data, **{"data.paths": paths, "data.weights": [1.0, w]}) for w in (1.0, 7.0)]
    assert not np.array_equal(weighted[0], weighted[1])


def test_source_and_tokenizer(tmp_path):
    source = tmp_path / "text.txt"
    source.write_text("the dog has two heads and one tail " * 50)
    tokenizers = {}
    for tokenizer in ("byte", "train:300"):
        folder = tmp_path / tokenizer
        changes = {"data.source": str(source), "data.tokenizer": tokenizer}
        prepare_if_missing(config_of("unused", folder, **changes).data)
        tokenizers[tokenizer] = json.loads((folder / "index.json").read_text())["tokenizer"]["name"]
    assert tokenizers == {"byte": "byte", "train:300": "train:300"}


def test_prefetch(data):
    with mock.patch.object(loader.grain, "ReadOptions", wraps=loader.grain.ReadOptions) as options:
        _first_batch(data, **{"data.prefetch": 3})
    assert options.call_args.kwargs["prefetch_buffer_size"] == 3


def test_max_skipped_steps(data, tmp_path):
    for limit in (1, 3):
        with poisoned(lambda _: True):
            diverged = run(config_of(tmp_path / str(limit), data, training__max_skipped_steps=limit))
        assert diverged.code == 1
        assert diverged.out.count(" skipped: ") == limit


def test_watchdog_seconds(data, tmp_path):
    with mock.patch.object(trainer, "Watchdog", wraps=trainer.Watchdog) as watchdog:
        run(config_of(tmp_path / "run", data, training__steps=1, training__watchdog_seconds=30.0))
    watchdog.assert_called_once_with(30.0)


def test_compile_cache(data, tmp_path):
    with mock.patch.object(trainer, "use_compile_cache") as use:
        run(config_of(tmp_path / "run", data, training__steps=1, training__compile_cache="compiled"))
    use.assert_called_once_with("compiled")


def test_wandb_and_its_project(data, tmp_path):
    wandb = types.SimpleNamespace(init=mock.Mock())
    with mock.patch.dict("sys.modules", wandb=wandb):
        changes = {"metrics.wandb": "offline", "metrics.wandb_project": "other"}
        run(config_of(tmp_path / "run", data, training__steps=2, **changes))
    assert wandb.init.call_args.kwargs["mode"] == "offline"
    assert wandb.init.call_args.kwargs["project"] == "other"
    logged = wandb.init.return_value.log.call_args_list
    assert [call.kwargs["step"] for call in logged] == [1, 2, 2]
