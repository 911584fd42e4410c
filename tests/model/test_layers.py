"""Rotary positions against float64, and what bfloat16 must not cost."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from orthros_jax.model.layers import Embedding, RMSNorm, apply_rope, rope_frequencies, rope_table

from . import reference
from .small import fast_jit, logits, random_params, small_config
from .test_model import _layout


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6])
def test_rotation_at_long_positions_errs_no_more_than_at_short_ones(base):
    config = small_config(head_dim=128, rope_base=base, compute_dtype="bfloat16")
    positions = np.array([[0, 255, 4095, 131071]])
    x = jax.random.normal(jax.random.key(0), (1, 4, 8, 128)).astype(jnp.bfloat16)
    rotated = apply_rope(x, rope_table(jnp.asarray(positions), config))
    assert rotated.dtype == jnp.bfloat16
    error = [
        np.asarray(rotated[0, i], np.float64) - reference.rotate(np.asarray(x[0, i], np.float64), position, config)
        for i, position in enumerate(positions[0])
    ]
    rms = [np.sqrt((e**2).mean()) for e in error]
    assert rms[0] == 0
    assert 1e-3 < rms[1] < 2e-3  # half a unit of eight bits, uniformly spread
    assert rms[2] < 1.25 * rms[1]
    assert rms[3] < 1.5 * rms[1]
    assert np.abs(error[3]).max() < 2 * np.abs(error[1]).max()


def test_rotation_angles_are_exact_to_float32():
    config = small_config(head_dim=128, rope_base=5e5)
    for position in (1, 255, 4095, 131071):
        cos, sin = rope_table(jnp.array([[position]]), config)
        angle = position * reference.frequencies(config)
        # The frequency and the angle are each rounded to 24 bits.
        bound = 2**-23 * np.maximum(angle, 1)
        np.testing.assert_array_less(np.abs(cos[0, 0] - np.cos(angle)), bound)
        np.testing.assert_array_less(np.abs(sin[0, 0] - np.sin(angle)), bound)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies(factor):
    plain = small_config(head_dim=128, rope_base=5e5)
    config = dataclasses.replace(plain, rope_scaling="llama3", rope_factor=factor)
    scaled, unscaled = rope_frequencies(config), rope_frequencies(plain)
    wavelength = 2 * np.pi / reference.frequencies(plain)
    short, long = wavelength < 2048, wavelength > 8192
    between = ~short & ~long
    assert short.any()
    assert long.any()
    assert between.sum() >= 3
    np.testing.assert_array_equal(scaled[short], unscaled[short])
    np.testing.assert_array_equal(scaled[long], unscaled[long] / np.float32(factor))
    ratio = unscaled[between] / scaled[between]
    assert (ratio > 1).all()
    assert (ratio < factor).all()
    assert (np.diff(ratio) > 0).all()
    np.testing.assert_allclose(scaled, reference.frequencies(config), rtol=1e-6)


@pytest.mark.parametrize("kind", ["orthros", "transformer"])
def test_only_differences_of_positions_matter(kind):
    config = small_config(kind=kind)
    params, layout = random_params(config), _layout(config)
    here = logits(config, params, layout)
    shifted = logits(config, params, dataclasses.replace(layout, positions=layout.positions + 100))
    stretched = logits(config, params, dataclasses.replace(layout, positions=layout.positions * 2))
    np.testing.assert_allclose(shifted, here, rtol=0, atol=1e-4)
    assert np.abs(stretched - here).max() > 0.1


def test_gradient_of_a_frequent_token_is_summed_in_the_parameters_type():
    """A sum of equal terms in bfloat16 stops at 256 of them."""
    graph, params = nnx.split(Embedding(small_config(compute_dtype="bfloat16"), nnx.Rngs(0)))
    tokens = jnp.zeros((8, 512), jnp.int32)
    gradient = fast_jit(jax.grad(lambda p: nnx.merge(graph, p)(tokens).astype(jnp.float32).sum()))(params)
    np.testing.assert_allclose(gradient["kernel"][...][0], 4096.0)


def test_norm_statistics_are_float32():
    norm = RMSNorm(4096, small_config(norm_eps=1e-6))
    x = jnp.full((1, 4096), 3.0, jnp.bfloat16)
    np.testing.assert_array_equal(norm(x), jnp.ones((1, 4096), jnp.bfloat16))
