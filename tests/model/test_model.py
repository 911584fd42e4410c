"""Logits of every kind of model against the float64 reference."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from orthros_jax import streams

from . import reference
from .small import compute_logits, fast_jit, logits, random_params, small_config

pytestmark = pytest.mark.usefixtures("compile_cache")

_CASES = {
    "scale_offset": {},
    "shared": {"query_sharing": "shared"},
    "separate": {"query_sharing": "separate"},
    "qk_norm": {"qk_norm": True},
    "qk_norm_scale_offset_before": {"qk_norm": True, "scale_offset_position": "before_norm"},
    "qk_norm_separate": {"qk_norm": True, "query_sharing": "separate"},
    "output_window": {"output_window": 6},
    "tied": {"tie_embeddings": True},
    "multi_head": {"num_kv_heads": 4},
    "multi_query_wide_head": {"num_kv_heads": 1, "head_dim": 14},
    "rope_base": {"rope_base": 50.0},
    "llama3": {
        "rope_base": 50.0,
        "rope_scaling": "llama3",
        "rope_factor": 32.0,
        "rope_original_length": 64,
    },
    "norm_eps": {"norm_eps": 0.3},
    "one_layer": {"num_layers": 1},
    "two_layers": {"num_layers": 2},
    "window_one": {"window": 1},
    "transformer": {"kind": "transformer"},
    "transformer_one_layer": {"kind": "transformer", "num_layers": 1, "qk_norm": True},
    "transformer_llama3_tied": {
        "kind": "transformer",
        "tie_embeddings": True,
        "rope_scaling": "llama3",
        "rope_original_length": 64,
        "rope_base": 50.0,
    },
    "sliding_window": {"kind": "sliding_window"},
    "sliding_window_two_layers": {"kind": "sliding_window", "num_layers": 2, "qk_norm": True},
}

# Two packed documents and padding; one document alone; three documents of which one is a single token.
_SEGMENTS = np.array([[1] * 14 + [2] * 6 + [0] * 2, [1] * 22, [1] + [2] * 8 + [3] * 13])


def _tokens(config, seed=1):
    return np.random.default_rng(seed).integers(0, config.vocab_size, _SEGMENTS.shape)


def _layout(config, out_index=None):
    tokens, segments = jnp.asarray(_tokens(config), jnp.int32), jnp.asarray(_SEGMENTS, jnp.int32)
    positions = streams.document_positions(segments)
    return streams.Layout(tokens, positions, segments, out_index)


def _expected(params, config, out_rows, cast=lambda x: x):
    tokens = _tokens(config)
    return np.stack(
        [reference.logits(params, config, tokens[b], _SEGMENTS[b], out_rows[b], cast=cast) for b in range(len(tokens))]
    )


@pytest.mark.parametrize("case", _CASES)
def test_logits_of_all_rows(case):
    config = small_config(**_CASES[case])
    params = random_params(config)
    actual = logits(config, params, _layout(config))
    expected = _expected(params, config, [list(range(22))] * 3)
    assert expected.std() > 0.3
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["scale_offset", "transformer", "sliding_window", "one_layer"])
def test_logits_of_chosen_rows(case):
    config = small_config(**_CASES[case])
    params = random_params(config)
    out_rows = np.array([[0, 3, 15, 19, -1], [20, 21, -1, -1, -1], [0, 1, 9, 20, 21]])
    actual = logits(config, params, _layout(config, jnp.asarray(out_rows, jnp.int32)))
    assert np.isfinite(actual).all()
    chosen = out_rows >= 0
    expected = _expected(params, config, out_rows.tolist())
    np.testing.assert_allclose(np.asarray(actual)[chosen], expected[chosen], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["qk_norm", "transformer"])
def test_gradient_of_every_parameter(case):
    """Along a random direction of each parameter, against central differences of the float64 reference."""
    config = small_config(**_CASES[case])
    params, tokens = random_params(config), _tokens(config)
    random = np.random.default_rng(5)
    weigh = random.normal(size=(*_SEGMENTS.shape, config.vocab_size))

    def objective(params):
        return (compute_logits(config, params, _layout(config))[0] * weigh[0]).sum()

    gradient = fast_jit(jax.grad(objective))(params)

    def exact(params):
        scores = reference.logits(params, config, tokens[0], _SEGMENTS[0], list(range(22)))
        return (scores * weigh[0]).sum()

    leaves, tree = jax.tree.flatten(jax.tree.map(lambda x: np.asarray(x, np.float64), params))
    for i, slope in enumerate(jax.tree.leaves(gradient)):
        direction = random.normal(size=leaves[i].shape)
        step = 1e-5 * direction
        above, below = (
            exact(jax.tree.unflatten(tree, [*leaves[:i], leaves[i] + sign * step, *leaves[i + 1 :]]))
            for sign in (1, -1)
        )
        expected = (above - below) / 2e-5
        assert abs(expected) > 1e-2
        np.testing.assert_allclose((slope * direction).sum(), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("case", ["scale_offset", "qk_norm", "transformer"])
def test_bfloat16_errs_no_more_than_its_roundings(case):
    """The yardstick is the reference with every stored value rounded to bfloat16 and all sums exact."""
    config = small_config(**_CASES[case], compute_dtype="bfloat16")

    def rounded(x):
        return np.asarray(x, ml_dtypes.bfloat16).astype(np.float64)

    params = random_params(config)
    params = {
        name: reference._map(lambda x: jnp.asarray(x, jnp.bfloat16).astype(jnp.float32), value)
        for name, value in params.items()
    }
    out_rows = [list(range(22))] * 3
    exact = _expected(params, config, out_rows)
    yardstick = _expected(params, config, out_rows, cast=rounded) - exact
    error = np.asarray(logits(config, params, _layout(config)), np.float64) - exact
    floor = 1e-5 * np.abs(exact).max()
    assert np.abs(yardstick).max() > 1e-3
    assert np.sqrt((error**2).mean()) <= 2 * np.sqrt((yardstick**2).mean()) + floor
    assert np.abs(error).max() <= 2 * np.abs(yardstick).max() + floor


def test_hidden_rows_have_the_compute_type_and_logits_the_statistics_type():
    config = small_config(compute_dtype="bfloat16")
    assert logits(config, random_params(config), _layout(config)).dtype == jnp.float32
