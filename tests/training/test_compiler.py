"""Options of the compiler, and unrolled layers: other programs, the same numbers."""

import dataclasses
import functools
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthros_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from orthros_jax.training.compiler import compiler_options, use_device_memory
from orthros_jax.training.step import make_program, output_rows

pytestmark = pytest.mark.usefixtures("compile_cache")

T, B = 16, 4
MODEL: dict[str, Any] = {
    **{"vocab_size": 48, "num_layers": 4, "model_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    **{"ffn_dim": 24, "window": 4, "compute_dtype": "float32", "init_std": 0.2},
}


def _mesh_on(platform) -> Any:
    return SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))


def test_options_are_those_of_the_platform():
    assert compiler_options(_mesh_on("cuda")) == compiler_options(_mesh_on("gpu")) != {}
    assert compiler_options(_mesh_on("cpu")) == compiler_options(_mesh_on("tpu")) == {}


@pytest.mark.skipif(jax.__version_info__[:2] != (0, 11), reason="needs a compiler for GPUs")
def test_the_compiler_knows_every_option():
    """Options of the GPU compiler are part of XLA on every platform; a name that is not is refused."""
    lowered = jax.jit(jnp.sin).lower(1.0)
    lowered.compile(compiler_options(_mesh_on("gpu")))
    with pytest.raises(jax.errors.JaxRuntimeError):
        lowered.compile({"xla_gpu_enable_tritonn_gemm": False})


def test_the_environment_decides_on_memory():
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    with mock.patch.dict(os.environ, {name: "0.5"}):
        use_device_memory()
        assert os.environ[name] == "0.5"
        del os.environ[name]
        use_device_memory()
        assert float(os.environ[name]) > 0.9


# Compiling takes far longer than running; without optimisation of machine code it takes half the time.
_fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def _losses(steps, training=None, **model):
    """Loss and number of predicted tokens of each step on random tokens."""
    config = Config(
        model=ModelConfig(**MODEL | model),
        data=DataConfig(sequence_length=T),
        optimizer=OptimizerConfig(schedule="constant", learning_rate=1e-2),
        training=TrainingConfig(batch_size=B, **training or {}),
    )
    program = make_program(config, 20)
    state = _fast_jit(program.init)(jax.random.key(0))
    step = _fast_jit(program.train_step)
    random = np.random.default_rng(0)
    losses, weights = [], []
    for _ in range(steps):
        tokens = jnp.asarray(random.integers(0, 48, (B, T + 1)), jnp.int32)
        segment_ids = jnp.asarray([[1] * 9 + [2] * 8, [1] * 17, [1] * 3 + [0] * 14, [1] * 17], jnp.int32)
        state, metrics = step(state, {"tokens": tokens, "segment_ids": segment_ids})
        losses.append(float(metrics.cross_entropy / metrics.weight))
        weights.append(int(metrics.weight))
    return np.array(losses), weights


@pytest.fixture(scope="module")
def losses():
    return _losses(20)[0]


def test_unrolled_layers_train_to_the_same_losses(losses):
    """Float32 sums in another order, whose differences 20 steps of AdamW carry on."""
    found, _ = _losses(20, unroll=3)
    np.testing.assert_allclose(found, losses, rtol=1e-4)


def test_float8_trains_to_about_the_same_losses(losses):
    expected, found = losses, _losses(20, float8=True)[0]
    assert 1e-6 < np.abs(found - expected).max() < 0.1


def test_a_part_of_the_output_rows():
    """The rows are drawn from those that predict (8 + 7 + ... of each sequence), and anew in each step."""
    found, weights = _losses(3, {"output_fraction": 0.25})
    assert weights == [4 + 4 + 2 + 4] * 3
    again, _ = _losses(3, {"output_fraction": 0.25})
    np.testing.assert_array_equal(found, again)
    other, _ = _losses(3, {"output_fraction": 0.25, "seed": 1})
    assert (found != other).all()


@pytest.mark.parametrize(("fraction", "rows"), [(1.0, 16), (0.5, 8), (0.26, 4), (0.001, 1)])
def test_number_of_output_rows(fraction, rows):
    config = Config(
        data=DataConfig(sequence_length=T), training=dataclasses.replace(TrainingConfig(), output_fraction=fraction)
    )
    assert output_rows(config) == rows
