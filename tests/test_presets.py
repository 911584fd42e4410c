"""The files under configs/: exact parameter counts, the recipes, and nothing that repeats a default."""

import math
from pathlib import Path

import jax
import pytest
import settings
import yaml
from flax import nnx
from jax.sharding import AbstractMesh

from orthros_jax.config import Config
from orthros_jax.config_reader import read_config
from orthros_jax.model import build_model
from orthros_jax.sharding import MESH_AXES, check_divisible

CONFIGS = Path(__file__).parent.parent / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))

# L, D, N, H, F; parameters without and with scale-offset.
SIZES = {
    "160m": (12, 768, 12, 64, 3072, 162_417_408, 162_452_736),
    "360m": (24, 1024, 16, 64, 2816, 373_867_520, 373_963_776),
    "780m": (24, 1536, 12, 128, 4096, 777_856_512, 778_000_896),
    "1b3": (24, 2048, 16, 128, 5632, 1_364_297_728, 1_364_490_240),
    "2b7": (32, 2560, 20, 128, 6912, 2_701_560_320, 2_701_882_880),
    "6b8": (32, 4096, 32, 128, 11008, 6_738_415_616, 6_738_931_712),
}
REFERENCE_RUNS = ("orthros_1b3_fineweb_edu", "transformer_1b3_fineweb_edu", "sliding_window_1b3_fineweb_edu")


def preset(name: str, *overrides: str) -> Config:
    return read_config(["--config", str(CONFIGS / f"{name}.yaml"), *overrides])


def count_parameters(config: Config) -> int:
    model = nnx.eval_shape(lambda: build_model(config.model, nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def differences(one: Config, other: Config) -> dict[str, tuple]:
    ours, theirs = settings.leaves(one), settings.leaves(other)
    return {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}


def test_all_presets_are_listed_here():
    scaling = {f"orthros_{size}" for size in SIZES}
    assert set(NAMES) == {"quickstart", "orthros_1b3_without_scale_offset", *scaling, *REFERENCE_RUNS}


@pytest.mark.parametrize("name", NAMES)
def test_states_only_what_differs_from_the_defaults(name):
    tree = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    given = {
        "run_dir",
        *(f"{section}.{leaf}" for section in tree.keys() - {"run_dir"} for leaf in tree[section]),
    }
    assert given == differences(preset(name), Config()).keys()
    assert "data.paths" in given


@pytest.mark.parametrize("size", SIZES)
def test_scaling_shapes_and_parameters(size):
    *shape, without, with_scale_offset = SIZES[size]
    model = preset(f"orthros_{size}").model
    assert [model.num_layers, model.model_dim, model.num_heads, model.head_dim, model.ffn_dim] == shape
    assert (model.num_kv_heads, model.vocab_size, model.tie_embeddings) == (model.num_heads, 32000, False)
    assert (model.window, model.output_window, model.norm_eps, model.rope_base) == (128, None, 1e-6, 1e4)
    assert (model.param_dtype, model.compute_dtype, model.statistics_dtype) == (
        "float32",
        "bfloat16",
        "float32",
    )
    assert count_parameters(preset(f"orthros_{size}")) == with_scale_offset
    assert count_parameters(preset(f"orthros_{size}", "--model.query_sharing", "shared")) == without
    assert count_parameters(preset(f"orthros_{size}", "--model.kind", "transformer")) == without


@pytest.mark.parametrize("size", SIZES)
def test_scaling_recipe(size):
    config = preset(f"orthros_{size}")
    optimizer, training = config.optimizer, config.training
    assert (config.data.sequence_length, training.batch_size, training.steps) == (2048, 128, 38147)
    assert training.steps == math.ceil(10e9 / (128 * 2048))
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.98, 0.1)
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.final_ratio) == ("linear", 375, 0.0)
    assert optimizer.schedule_steps is None
    assert optimizer.learning_rate == (7.5e-4 if size == "6b8" else 1.5e-3)
    assert config.run_dir == f"runs/orthros_{size}"


def test_ablation_differs_in_query_sharing_alone():
    base, ablation = preset("orthros_1b3"), preset("orthros_1b3_without_scale_offset")
    assert differences(base, ablation) == {
        "run_dir": ("runs/orthros_1b3", "runs/orthros_1b3_without_scale_offset"),
        "model.query_sharing": ("scale_offset", "shared"),
    }
    assert count_parameters(ablation) == 1_364_297_728


def test_reference_run():
    config = preset("orthros_1b3_fineweb_edu")
    optimizer, training = config.optimizer, config.training
    assert (config.data.paths, config.data.sequence_length) == (["data/fineweb_edu_100bt"], 2048)
    assert training.batch_size * config.data.sequence_length == 2_097_152
    assert training.steps == 47_684 == math.ceil(100e9 / 2_097_152)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.95, 0.1)
    assert (optimizer.clip_norm, optimizer.warmup_steps, optimizer.schedule) == (1.0, 477, "cosine")
    assert optimizer.learning_rate == 4e-4
    assert optimizer.learning_rate * optimizer.final_ratio == pytest.approx(4e-5)
    assert training.batch_size % (8 * training.accumulation) == 0
    assert config.checkpoint.every == 1000
    assert config.model.window == 128
    assert count_parameters(config) == 1_364_490_240


def test_counterparts_of_the_reference_run_differ_in_the_kind_alone():
    orthros, transformer, sliding_window = map(preset, REFERENCE_RUNS)
    runs = "runs/{}_1b3_fineweb_edu".format
    assert differences(orthros, transformer) == {
        "run_dir": (runs("orthros"), runs("transformer")),
        "model.kind": ("orthros", "transformer"),
    }
    assert differences(orthros, sliding_window) == {
        "run_dir": (runs("orthros"), runs("sliding_window")),
        "model.kind": ("orthros", "sliding_window"),
        "model.window": (128, 512),
    }
    assert count_parameters(transformer) == count_parameters(sliding_window) == 1_364_297_728


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("pods/*.yaml")), ids=lambda path: path.stem)
def test_pods_divide_batch_and_model(path):
    """The name ends in the chips along each axis; a run and its pod stand beside each other."""
    size, _, extents = path.stem.split("_")
    base = "orthros_1b3_fineweb_edu" if size == "1b3" else f"orthros_{size}"
    config = preset(base, "--config", str(path))
    chips = math.prod(int(extent) for extent in extents.split("x"))
    data, rest = divmod(chips, config.mesh.fsdp)
    assert (rest, config.mesh.data) == (0, -1)
    check_divisible(config, AbstractMesh((data, config.mesh.fsdp, 1, 1), MESH_AXES))  # pyright: ignore
    assert config.training.batch_size * config.data.sequence_length == 2_097_152
    assert config.training.steps * 2_097_152 == pytest.approx(100e9, rel=1e-4)
    assert config.optimizer.warmup_steps == 477


def test_quickstart_is_small_and_needs_nothing_but_python():
    config = preset("quickstart")
    assert (config.data.source, config.data.tokenizer, config.model.vocab_size) == (
        "python-stdlib",
        "byte",
        258,
    )
    assert config.model.compute_dtype == "float32"
    assert 1_000_000 <= count_parameters(config) <= 3_000_000
    assert config.run_dir == "runs/quickstart_orthros"
    assert preset("quickstart", "--model.kind", "sliding_window").run_dir == "runs/quickstart_sliding_window"
