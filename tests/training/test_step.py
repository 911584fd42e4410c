"""The training step: gradient accumulation, steps that are skipped, and what it must never hold in memory."""

import functools
import re
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orthros_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from orthros_jax.training.step import make_program

pytestmark = pytest.mark.usefixtures("compile_cache")

T, B, V = 12, 8, 48


def _config(accumulation=1, **model):
    settings: dict[str, Any] = {
        "vocab_size": V,
        "num_layers": 2,
        "model_dim": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
    }
    settings |= {"ffn_dim": 24, "window": 4, "compute_dtype": "float32", "init_std": 0.2} | model
    return Config(
        model=ModelConfig(**settings),
        data=DataConfig(sequence_length=T),
        optimizer=OptimizerConfig(warmup_steps=0, schedule="constant", learning_rate=1e-2, ema_decay=0.9),
        training=TrainingConfig(batch_size=B, accumulation=accumulation, z_loss=1e-3),
    )


# Compiling takes far longer than running; without optimisation of machine code it takes half the time.
_fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def _program(accumulation=1):
    program = make_program(_config(accumulation), 10)
    return program, _fast_jit(program.train_step)


def _batch(seed=0, highest=V - 1):
    """Documents of unequal length and padding; rows 1 and 5, a micro-batch of four, have no token."""
    random = np.random.default_rng(seed)
    segments = np.zeros((B, T + 1), np.int32)
    for row, cuts in enumerate([(13,), (), (2,), (1, 5, 6), (3, 4, 9), (), (2, 3), (13,)]):
        for document, (start, end) in enumerate(zip((0, *cuts), cuts, strict=False)):
            segments[row, start:end] = document + 1
    tokens = random.integers(0, highest, segments.shape)
    return {"tokens": jnp.asarray(tokens, jnp.int32), "segment_ids": jnp.asarray(segments)}


def _weight(segments):
    segments = np.asarray(segments)
    return ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)).sum()


@pytest.mark.parametrize("accumulation", [2, 4])
def test_micro_batches_weigh_by_their_tokens(accumulation):
    batch = _batch()
    micro_batches = [_weight(batch["segment_ids"][i::accumulation]) for i in range(accumulation)]
    assert micro_batches == {2: [20, 15], 4: [18, 0, 2, 15]}[accumulation]
    whole, step = _program()
    state = _fast_jit(whole.init)(jax.random.key(0))
    one_state, one = step(state, batch)
    many_state, many = _program(accumulation)[1](state, batch)
    np.testing.assert_allclose(many, one, rtol=1e-5)
    assert one.weight == _weight(batch["segment_ids"])
    for name in ("mu", "nu"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8),
            *(optax.tree.get(s.opt_state, name) for s in (many_state, one_state)),
        )


def test_metrics_of_a_batch():
    batch = _batch()
    _, step = _program()
    program, _ = _program()
    state = _fast_jit(program.init)(jax.random.key(0))
    new_state, metrics = step(state, batch)
    sums = _fast_jit(program.eval_step)(state.params, batch)
    np.testing.assert_allclose(sums.cross_entropy, metrics.cross_entropy, rtol=1e-5)
    np.testing.assert_allclose(sums.weight, metrics.weight)
    assert sums.objective > sums.cross_entropy
    assert metrics.documents == 1 + 0 + 1 + 3 + 3 + 0 + 2 + 1
    runs = [12, 2, 1, 4, 1, 3, 1, 5, 2, 1, 12]
    assert metrics.output_pairs == sum(n * (n + 1) // 2 for n in runs)
    assert metrics.context_pairs == sum(min(i + 1, 4) for n in runs for i in range(n))
    assert metrics.learning_rate == np.float32(1e-2)
    assert (new_state.step, new_state.samples, metrics.step) == (1, B, 1)


def _assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def _assert_skipped(before, after, metrics, in_a_row):
    for name in ("params", "opt_state", "ema", "step"):
        _assert_same(getattr(before, name), getattr(after, name))
    assert after.samples == before.samples + B
    assert after.skipped == before.skipped + 1
    assert after.skipped_in_a_row == in_a_row
    assert (metrics.skipped, metrics.skipped_in_a_row) == (after.skipped, in_a_row)
    assert metrics.step == before.step


def test_a_step_with_nan_is_skipped():
    """Token V - 1 has a NaN embedding and stands in one row of the batch."""
    program, step = _program()
    state = _fast_jit(program.init)(jax.random.key(0))
    state.params["embedding"]["kernel"] = state.params["embedding"]["kernel"].at[V - 1].set(jnp.nan)
    good = _batch()
    bad = {**good, "tokens": good["tokens"].at[7, 3].set(V - 1)}
    first, metrics = step(state, bad)
    assert not np.isfinite(metrics.cross_entropy)
    _assert_skipped(state, first, metrics, in_a_row=1)
    second, metrics = step(first, bad)
    _assert_skipped(first, second, metrics, in_a_row=2)
    third, metrics = step(second, good)
    assert np.isfinite(metrics.cross_entropy)
    assert (third.step, third.samples, third.skipped, third.skipped_in_a_row) == (1, 3 * B, 2, 0)
    # The step that follows is the one that would have come first.
    alone, _ = step(state, good)
    _assert_same((alone.params, alone.opt_state, alone.ema), (third.params, third.opt_state, third.ema))
    assert (third.params["head"]["kernel"] != state.params["head"]["kernel"]).all()


def test_a_step_with_infinite_gradient_norm_and_finite_loss_is_skipped():
    program, step = _program()
    state = _fast_jit(program.init)(jax.random.key(0))
    state.params["head"]["kernel"] *= 1e14
    after, metrics = step(state, _batch())
    assert np.isfinite(metrics.cross_entropy)
    assert not np.isfinite(metrics.grad_norm)
    _assert_skipped(state, after, metrics, in_a_row=1)


def test_a_batch_without_a_token_moves_no_moment():
    program, step = _program()
    state = _fast_jit(program.init)(jax.random.key(0))
    batch = _batch()
    after, metrics = step(state, {**batch, "segment_ids": jnp.zeros_like(batch["segment_ids"])})
    assert (metrics.weight, metrics.cross_entropy, metrics.grad_norm) == (0, 0, 0)
    assert after.step == 1
    for name in ("mu", "nu"):
        moments = optax.tree.get(after.opt_state, name)
        jax.tree.map(lambda m: np.testing.assert_array_equal(m, 0), moments)
    np.testing.assert_array_equal(after.params["final_norm"]["scale"], 1)


def test_the_loss_of_packed_documents_is_that_of_the_documents_alone():
    program, _ = _program()
    params = _fast_jit(program.init)(jax.random.key(0)).params
    evaluate = _fast_jit(program.eval_step)
    packed = evaluate(
        params,
        {
            "tokens": jnp.array([[5, 6, 7, 8, 9, 10, 0]] * 2),
            "segment_ids": jnp.array([[1, 1, 1, 2, 2, 2, 0]] * 2),
        },
    )
    alone = evaluate(
        params,
        {
            "tokens": jnp.array([[5, 6, 7, 0, 0, 0, 0], [8, 9, 10, 0, 0, 0, 0]]),
            "segment_ids": jnp.array([[1, 1, 1, 0, 0, 0, 0]] * 2),
        },
    )
    assert (packed.weight, alone.weight) == (8, 4)
    np.testing.assert_allclose(packed.cross_entropy, 2 * alone.cross_entropy, rtol=1e-5)


def _largest_array(compiled) -> int:
    shapes = re.findall(r"\b(?:pred|token|[a-z]+\d+[a-z0-9]*)\[([\d,]+)\]", compiled.as_text())
    assert len(shapes) > 100
    return max(prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.parametrize(("kind", "tie_embeddings"), [("orthros", False), ("transformer", True)])
def test_no_array_holds_a_quarter_of_the_logits(kind, tie_embeddings):
    length, vocabulary = 16, 512
    config = _config(kind=kind, vocab_size=vocabulary, tie_embeddings=tie_embeddings)
    program = make_program(config, 10)
    state = jax.eval_shape(program.init, jax.random.key(0))
    rows = jax.ShapeDtypeStruct((B, length + 1), jnp.int32)
    step = _fast_jit(program.train_step, donate_argnums=0)
    compiled = step.lower(state, {"tokens": rows, "segment_ids": rows}).compile()
    assert _largest_array(compiled) < B * length * vocabulary / 4


def test_the_search_for_large_arrays_finds_dense_logits():
    length, vocabulary = 16, 512

    def loss(hidden, head, labels):
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ head, labels).sum()

    shapes = ((B, length, 16), jnp.float32), ((16, vocabulary), jnp.float32), ((B, length), jnp.int32)
    compiled = (
        jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).compile()
    )
    assert _largest_array(compiled) >= B * length * vocabulary
