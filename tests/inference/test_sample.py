"""The sampler against a loop of whole forward passes."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from orthros_jax import streams
from orthros_jax.config import MeshConfig, ModelConfig
from orthros_jax.inference.sample import sample_continuation
from orthros_jax.model import build_model
from orthros_jax.sharding import build_mesh, state_shardings

V = 48
PROMPT = np.array([5, 9, 3, 7, 7, 1])


def _model(**changes):
    """Random weights; the window is shorter than the prompt."""
    settings: dict[str, Any] = {
        "vocab_size": V,
        "num_layers": 2,
        "model_dim": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
    }
    settings |= {"ffn_dim": 24, "window": 3, "compute_dtype": "float32", "init_std": 0.3} | changes
    graph, params = nnx.split(build_model(ModelConfig(**settings), nnx.Rngs(0)), nnx.Param)
    return graph, nnx.to_pure_dict(params)


@partial(jax.jit, static_argnums=0)
def _logits(graph, params, tokens, segment_ids):
    layout, _ = streams.pretraining(tokens, segment_ids)
    model = nnx.merge(graph, params)
    return model.logits(model(layout))


def _next_logits(graph, params, tokens):
    """Logits behind the last token, of all rows of the sequence as in pretraining; what follows it is padding."""
    rows = np.zeros((2, 1, 20), np.int32)
    rows[0, 0, : len(tokens)], rows[1, 0, : len(tokens)] = tokens, 1
    return np.asarray(_logits(graph, params, *rows))[0, len(tokens) - 1]


@pytest.mark.parametrize(
    "changes",
    [{}, {"query_sharing": "separate", "qk_norm": True}, {"kind": "transformer"}, {"kind": "sliding_window"}],
    ids=["orthros", "separate", "transformer", "sliding_window"],
)
def test_a_cold_sample_takes_the_likeliest_token_each_time(changes):
    graph, params = _model(**changes)
    tokens = list(PROMPT)
    for _ in range(5):
        logits = _next_logits(graph, params, tokens)
        second, first = np.sort(logits)[-2:]
        assert first - second > 1e-3
        tokens.append(int(np.argmax(logits)))
    sampled = sample_continuation(graph, params, PROMPT, 5, temperature=1e-5)
    np.testing.assert_array_equal(sampled, tokens[len(PROMPT) :])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_samples_follow_the_distribution(temperature):
    """First tokens of many seeds against softmax(logits / temperature)."""
    graph, params = _model()
    scores = _next_logits(graph, params, PROMPT).astype(np.float64) / temperature
    expected = np.exp(scores - scores.max())
    expected /= expected.sum()
    draws = 2000
    first = [
        sample_continuation(graph, params, PROMPT, 1, temperature=temperature, seed=seed)[0] for seed in range(draws)
    ]
    found = np.bincount(first, minlength=V) / draws
    np.testing.assert_allclose(found, expected, atol=4 * np.sqrt(0.25 / draws))
    # The other temperature is another distribution by far more than that.
    assert 0.02 < expected.max() < 0.98


def test_the_seed_decides():
    graph, params = _model()
    a, b, c = (sample_continuation(graph, params, PROMPT, 12, temperature=2.0, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()
    assert a.shape == (12,)
    assert len(set(a.tolist())) > 3


def test_a_mesh_samples_the_same():
    graph, params = _model()
    alone = sample_continuation(graph, params, PROMPT, 6, temperature=1e-5)
    mesh = build_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    sharded = jax.device_put(params, state_shardings(jax.eval_shape(lambda: params), mesh))
    with jax.set_mesh(mesh):
        sampled = sample_continuation(graph, sharded, PROMPT, 6, temperature=1e-5, copies=4)
    np.testing.assert_array_equal(sampled, alone)


def test_a_prompt_of_one_token():
    graph, params = _model()
    expected = np.argmax(_next_logits(graph, params, [4]))
    assert sample_continuation(graph, params, np.array([4]), 1, temperature=1e-5) == [expected]
