"""The schedule in closed form, and AdamW against a float64 reference."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orthros_jax.config import OptimizerConfig
from orthros_jax.training.optimizer import is_decayed, make_optimizer, update_ema
from orthros_jax.training.schedule import learning_rate_schedule


def reference_rate(kind, step, *, peak, final_ratio, warmup, length, decay):
    if step < warmup:
        return peak * (step + 1) / warmup
    final = peak * final_ratio
    if kind == "constant":
        return peak
    if step >= length:
        return final
    if kind == "wsd":
        start = max(length - decay, warmup)
        return peak if step <= start else peak + (final - peak) * (step - start) / (length - start)
    progress = (step - warmup) / (length - warmup)
    if kind == "linear":
        return peak + (final - peak) * progress
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_schedule_at_every_step(kind, warmup):
    config = OptimizerConfig(
        schedule=kind,
        learning_rate=3e-3,
        final_ratio=0.2,
        warmup_steps=warmup,
        decay_steps=11,
        schedule_steps=40,
    )
    schedule = jax.jit(learning_rate_schedule(config, steps=10**6))
    for step in range(60):
        expected = reference_rate(kind, step, peak=3e-3, final_ratio=0.2, warmup=warmup, length=40, decay=11)
        rate = schedule(jnp.int32(step))
        assert rate.dtype == jnp.float32
        assert float(rate) == pytest.approx(expected, rel=1e-6), step


def test_schedule_follows_the_run_unless_its_length_is_set():
    config = OptimizerConfig(schedule="linear", learning_rate=1.0, final_ratio=0.0)
    assert float(learning_rate_schedule(config, 10)(5)) == 0.5
    assert float(learning_rate_schedule(config, 20)(5)) == 0.75


def test_schedule_is_exact_far_into_a_long_run():
    config = OptimizerConfig(schedule="cosine", learning_rate=4e-4, warmup_steps=477)
    schedule = learning_rate_schedule(config, 47_684)
    for step in (0, 476, 477, 478, 20_000, 47_683, 47_684, 60_000):
        expected = reference_rate("cosine", step, peak=4e-4, final_ratio=0.1, warmup=477, length=47_684, decay=0)
        assert float(schedule(step)) == pytest.approx(expected, rel=1e-5), step


def parameters(dtype="float32"):
    numbers = np.random.default_rng(0)

    def leaf(*shape):
        return jnp.asarray(numbers.normal(size=shape), dtype)

    return {
        "embedding": leaf(16, 4),
        "layers": {  # stacked: a leading layer axis gives the vectors rank 2 and 3
            "attention": {
                "query": leaf(3, 4, 2, 2),
                "scale_offset": {"gamma": leaf(3, 2, 2), "beta": leaf(3, 2, 2)},
            },
            "norm": {"scale": leaf(3, 4)},
        },
        "final_norm": {"scale": leaf(4)},
    }


def test_only_matrices_decay():
    decayed = jax.tree.map_with_path(lambda path, _: is_decayed(path), parameters())
    assert decayed == {
        "embedding": True,
        "layers": {
            "attention": {"query": True, "scale_offset": {"gamma": False, "beta": False}},
            "norm": {"scale": False},
        },
        "final_norm": {"scale": False},
    }


def test_zero_gradients_shrink_what_decays_and_nothing_else():
    params = parameters()
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.5), lambda step: jnp.float32(0.1), params)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    for (path, value), update in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(updates), strict=True):
        decay = 0.05 if path[-1].key in ("embedding", "query") else 0.0
        np.testing.assert_allclose(update, -decay * np.asarray(value), rtol=1e-6)


@pytest.mark.parametrize("clip_norm", [0.0, 0.7])
def test_adamw_matches_float64(clip_norm):
    config = OptimizerConfig(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=clip_norm)
    rates = [0.01 * (step + 1) for step in range(6)]
    params = parameters()
    optimizer = make_optimizer(config, lambda step: jnp.asarray(rates, jnp.float32)[step], params)
    state = optimizer.init(params)
    leaves, treedef = jax.tree.flatten(params)
    decays = jax.tree.leaves(jax.tree.map_with_path(lambda path, _: 0.1 * is_decayed(path), params))
    expected = [np.asarray(leaf, np.float64) for leaf in leaves]
    first = [np.zeros_like(p) for p in expected]
    second = [np.zeros_like(p) for p in expected]
    numbers = np.random.default_rng(1)
    for step, rate in enumerate(rates):
        # Small and large gradients: the first leave clipping idle.
        gradients = [(0.01 if step < 2 else 1.0) * numbers.normal(size=p.shape) for p in expected]
        gradients = [np.asarray(g, np.float32).astype(np.float64) for g in gradients]
        norm = math.sqrt(sum((g**2).sum() for g in gradients))
        factor = min(1.0, clip_norm / norm) if clip_norm else 1.0
        assert not clip_norm or (factor == 1.0) == (step < 2)
        for i, gradient in enumerate(g * factor for g in gradients):
            first[i] = 0.9 * first[i] + 0.1 * gradient
            second[i] = 0.95 * second[i] + 0.05 * gradient**2
            direction = first[i] / (1 - 0.9 ** (step + 1))
            direction = direction / (np.sqrt(second[i] / (1 - 0.95 ** (step + 1))) + 1e-8)
            expected[i] = expected[i] - rate * (direction + decays[i] * expected[i])
        tree = jax.tree.unflatten(treedef, [jnp.asarray(g, jnp.float32) for g in gradients])
        updates, state = optimizer.update(tree, state, params)
        params = optax.apply_updates(params, updates)
    for actual, wanted in zip(jax.tree.leaves(params), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=1e-6)


def test_moments_are_float32_for_bfloat16_parameters():
    params = parameters("bfloat16")
    optimizer = make_optimizer(OptimizerConfig(), lambda step: jnp.float32(1e-3), params)
    state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
        moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 0]
        assert len(moments) == 2 * len(jax.tree.leaves(params))
        assert {leaf.dtype for leaf in moments} == {jnp.dtype("float32")}
        assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
        params = optax.apply_updates(params, updates)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}


def test_second_moment_keeps_small_additions():
    params = {"w": jnp.ones((1,), jnp.bfloat16)}
    optimizer = make_optimizer(OptimizerConfig(beta2=0.999, clip_norm=0.0), lambda step: jnp.float32(0), params)
    state = optimizer.init(params)
    for _ in range(400):
        _, state = optimizer.update({"w": jnp.ones((1,), jnp.bfloat16)}, state, params)
    (second,) = [leaf for path, leaf in jax.tree.leaves_with_path(state) if ".nu" in jax.tree_util.keystr(path)]
    assert float(second[0]) == pytest.approx(1 - 0.999**400, rel=1e-4)


def test_ema():
    ema = {"w": jnp.asarray([1.0, 2.0]), "v": jnp.asarray([256.0], jnp.bfloat16)}
    params = {"w": jnp.asarray([3.0, -2.0], jnp.bfloat16), "v": jnp.asarray([0.0])}
    result = update_ema(ema, params, 0.75)
    np.testing.assert_array_equal(result["w"], [1.5, 1.0])
    assert result["w"].dtype == jnp.float32
    assert result["v"].dtype == jnp.bfloat16
    assert float(result["v"][0]) == 192.0
