"""Prefill and decode against the full pretraining forward pass: the law of consistency, for every kind and shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthros_jax import streams
from orthros_jax.errors import UserError
from orthros_jax.inference.cache import CacheFullError
from orthros_jax.inference.engine import Engine, inference_mesh
from tests.model.small import logits, random_params, small_config

T, W = 40, 4
KINDS = ("orthros", "transformer", "sliding_window")
CLOSE = {"rtol": 0, "atol": 1e-4}


def tokens_of(seed, length=T):
    return np.random.default_rng(seed).integers(0, 40, length)


def full_forward(config, params, rows):
    """Logits [B, T, V] of every position."""
    rows = jnp.asarray(np.pad(rows, ((0, 0), (0, 1))), jnp.int32)
    return np.asarray(logits(config, params, streams.pretraining(rows)[0]))


def replay(engine, rows, lengths):
    """Logits by prefill of the first lengths[b] tokens of each row and decode of the others, with their positions."""
    lengths = np.asarray(lengths)
    prompts = np.where(np.arange(rows.shape[1]) < lengths[:, None], rows, 7)
    cache, scores = engine.prefill(prompts, lengths)
    yield lengths - 1, np.asarray(scores)
    while cache.longest < rows.shape[1]:
        cache, scores = engine.decode(cache, np.take_along_axis(rows, lengths[:, None], axis=1)[:, 0])
        yield lengths, np.asarray(scores)
        lengths = lengths + 1


def assert_consistent(engine, expected, rows, lengths, **close):
    for position, scores in replay(engine, rows, lengths):
        np.testing.assert_allclose(scores, expected[np.arange(len(rows)), position], **(close or CLOSE))


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_decode_are_the_full_forward(kind):
    config = small_config(kind=kind)
    params = random_params(config)
    rows = np.stack([tokens_of(0), tokens_of(1), tokens_of(2)])
    expected = full_forward(config, params, rows)
    engine = Engine(config, params, capacity=T, batch_size=3, chunk=16)
    assert_consistent(engine, expected, rows, [33, 1, 16])
