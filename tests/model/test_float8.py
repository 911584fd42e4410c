"""Matrix products in float8: error by the type's spacing, no state, and float8 products of cuBLAS on Hopper."""

import importlib.util
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from orthros_jax.compilation.topology import open_topology
from orthros_jax.model.float8 import float8_matmul, rounded


def _normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize(("dtype", "bits"), [(jnp.float8_e4m3fn, 3), (jnp.float8_e5m2, 2)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_rounding_is_relative_to_the_largest_value(dtype, bits, size):
    x = size * _normal(100, 50)
    values, scale = rounded(x, dtype)
    wide = values.astype(jnp.float32) * scale
    large = jnp.abs(x) > size / 100
    # Half the spacing of `bits` stored bits of mantissa, and the rounding of the scale.
    assert (jnp.abs(wide - x) / jnp.abs(x))[large].max() <= 2.0 ** -(bits + 1) + 1e-6
    np.testing.assert_allclose(jnp.abs(wide).max(), jnp.abs(x).max(), rtol=1e-6)


def test_zeros_stay_zeros_and_nan_stays_nan():
    zeros, scale = rounded(jnp.zeros((4, 4)), jnp.float8_e4m3fn)
    assert scale == 1
    assert not zeros.astype(jnp.float32).any()
    assert jnp.isnan(float8_matmul(jnp.full((2, 3), jnp.nan), jnp.ones((3, 2)))).all()


def test_products_and_gradients_are_those_of_the_rounded_operands():
    """Exactly: the reference multiplies the rounded operands in float64."""
    x, kernel, gradient = _normal(40, 30), _normal(30, 20, seed=1), 1e-4 * _normal(40, 20, seed=2)
    product, pull_back = jax.vjp(float8_matmul, x, kernel)
    d_x, d_kernel = pull_back(gradient)

    def exact(array, dtype):
        values, scale = rounded(array, dtype)
        return np.asarray(values, np.float64) * float(scale)

    x8, kernel8 = exact(x, jnp.float8_e4m3fn), exact(kernel, jnp.float8_e4m3fn)
    gradient8 = exact(gradient, jnp.float8_e5m2)
    # Sums of at most 40 products in float32.
    for found, expected in ((product, x8 @ kernel8), (d_x, gradient8 @ kernel8.T), (d_kernel, x8.T @ gradient8)):
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    # Two operands with errors of a sixteenth at most, mostly much less, and of different signs.
    true = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    assert 1e-3 < np.sqrt(np.mean((product - true) ** 2) / np.mean(true**2)) < 0.06


@pytest.mark.skipif(jax.__version_info__[:2] != (0, 11), reason="needs Python 3.12 and JAX 0.11")
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the packages of requirements-kernels.txt"
)
def test_a_hopper_gpu_makes_all_three_products_in_float8():
    sharding: Any = SingleDeviceSharding(open_topology("h200:1").devices[0])

    def product_and_gradients(x, kernel, gradient):
        product, pull_back = jax.vjp(float8_matmul, x, kernel)
        return product, pull_back(gradient)

    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=sharding) for s in ((512, 256), (256, 128), (512, 128))]
    lowered = jax.jit(product_and_gradients).lower(*arrays)
    program = lowered.compile({"xla_gpu_autotune_level": "0"}).as_text() or ""
    assert len(re.findall(r'custom_call_target="__cublas\$lt\$matmul\$f8"', program)) == 3
    assert not re.search(r'custom_call_target="__cublas(\$lt\$matmul|\$gemm)"', program)
