"""The Hopper kernels on a Hopper GPU; run with JAX_PLATFORMS=cuda."""

import logging
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import NAMES, assert_blind_rows_are_zero, assert_numerics, make_case, run
from test_gpu import PACKED, WHOLE

from orthros_jax.config import Config, DataConfig, ModelConfig, TrainingConfig
from orthros_jax.training.step import make_program
from pallas_kernels import dispatch, dual_stream_attention
from pallas_kernels.dual_stream_attention import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        getattr(jax.devices()[0], "compute_capability", None) != "9.0" or jax.__version_info__[:2] < (0, 11),
        reason="needs a Hopper GPU, Python 3.12, JAX 0.11 and JAX_PLATFORMS=cuda",
    ),
]

DOCUMENTS = make_case(T=1000, W=127, N=4, K=2, H=64, segments=[[(1, 1), (2, 1), (3, 700), (4, 200)], []])
CASES = {
    "window beyond T, output window": (WHOLE["window beyond T, output window"], jnp.bfloat16),
    "packed, padded, in float16": (PACKED["packed, padded"], jnp.float16),
    "window 129, output rows in any order": (
        make_case(
            T=1024, W=129, N=2, K=2, H=128, P=300, out_index=np.random.default_rng(0).integers(-1, 1024, (2, 300))
        ),
        jnp.bfloat16,
    ),
}


def _attention(case):
    return partial(dual_stream_attention, impl="hopper", **case.mask)


@pytest.mark.parametrize("name", CASES)
def test_numerics_rule_and_blind_rows(name):
    case, dtype = CASES[name]
    assert_blind_rows_are_zero(assert_numerics(_attention(case), case, dtype), case)


def test_calls_repeat_to_the_bit_on_memory_full_of_nan():
    attention = _attention(DOCUMENTS)
    first = assert_numerics(attention, DOCUMENTS)
    assert_blind_rows_are_zero(first, DOCUMENTS)
    # Freed arrays of the sizes that the second call asks for, and a large one for all else.
    shapes = [x.shape for x in first.values()] * 4
    poison = [jnp.full(shape, jnp.nan, jnp.bfloat16) for shape in shapes] + [jnp.full(2**28, jnp.nan, jnp.float32)]
    jax.block_until_ready(poison)
    del poison
    second = run(attention, DOCUMENTS, jnp.bfloat16)
    for name in NAMES:
        np.testing.assert_array_equal(first[name], second[name])


def test_more_than_two_to_the_31_elements():
    """The last rows, in the last key head's group of query heads, of 2**31 + 2**21 query elements a stream.

    Only the last rows see the last keys, so that their gradients are complete. An overflow would read other rows: an
    error as large as the values; rounding to bfloat16 leaves about a hundredth.
    """
    num_keys, num_heads, num_kv_heads, size, rows = 2**17 + 2**7, 128, 8, 128, 2
    group = num_heads // num_kv_heads

    @partial(jax.jit, static_argnums=1)
    def draw(key, heads):
        halves = [
            jax.random.normal(half, (1, num_keys, heads // 2, size), jnp.bfloat16) for half in jax.random.split(key)
        ]
        return jnp.concatenate(halves, axis=2)

    heads = (num_heads, num_heads, num_kv_heads, num_kv_heads, num_heads, num_heads)
    keys = jax.random.split(jax.random.key(0), len(heads))
    *arrays, d_ctx, d_out = (draw(key, n) for key, n in zip(keys, heads, strict=True))

    @jax.jit
    def values_and_gradients(arrays, cotangents):
        values, pull_back = jax.vjp(partial(dual_stream_attention, window=128, impl="hopper"), *arrays)
        return (*values, *pull_back(cotangents))

    results = values_and_gradients(arrays, (d_ctx, d_out))

    def last(x):
        return np.asarray(x[:, -rows:, -group if x.shape[2] == num_heads else -1 :], np.float64)

    q_ctx, q_out = (last(x) for x in arrays[:2])
    k, v = (np.asarray(x[:, :, -1:], np.float64) for x in arrays[2:])
    position, key = np.arange(num_keys - rows, num_keys)[None, :, None], np.arange(num_keys)
    causal = key <= position
    streams = (q_ctx, last(d_ctx), causal & (key > position - 128)), (q_out, last(d_out), causal)
    values = [reference.attention(q, k, v, visible) for q, _, visible in streams]
    (dq_ctx, *dkv_ctx), (dq_out, *dkv_out) = (
        reference.attention_grad(q, k, v, cotangent, visible) for q, cotangent, visible in streams
    )
    dk, dv = ((x + y)[:, -rows:] for x, y in zip(dkv_ctx, dkv_out, strict=True))
    for name, result, truth in zip(NAMES, results, (*values, dq_ctx, dq_out, dk, dv), strict=True):
        assert np.abs(last(result) - truth).max() <= 0.05 * np.abs(truth).max(), name


def test_auto_takes_hopper_in_the_train_step(caplog):
    """One step with the kernels and one with plain XLA: the same loss and gradient norm."""
    dispatch.log_once.cache_clear()
    model = ModelConfig(
        vocab_size=258, num_layers=2, model_dim=128, num_heads=4, num_kv_heads=2, head_dim=64, ffn_dim=256, window=128
    )
    config = Config(model=model, data=DataConfig(sequence_length=300), training=TrainingConfig(batch_size=2))
    random = np.random.default_rng(0)
    batch = {
        "tokens": jnp.asarray(random.integers(0, 256, (2, 301)), jnp.int32),
        "segment_ids": jnp.asarray(np.sort(random.integers(1, 4, (2, 301))), jnp.int32),
    }
    metrics = {}
    for impl in ("auto", "xla"):
        program = make_program(replace(config, model=replace(model, attention_impl=impl)), 10)
        with caplog.at_level(logging.INFO, logger="pallas_kernels"):
            metrics[impl] = jax.jit(program.train_step)(program.init(jax.random.key(0)), batch)[1]
    chosen = [message.split(";")[0] for message in caplog.messages]
    assert chosen == [f"{op}: impl=auto takes hopper" for op in ("dual_stream_attention", "cross_attention")]
    assert metrics["auto"].skipped == 0
    for name in ("cross_entropy", "grad_norm"):
        found, expected = (float(getattr(metrics[impl], name)) for impl in ("auto", "xla"))
        assert found == pytest.approx(expected, rel=2e-3), name
