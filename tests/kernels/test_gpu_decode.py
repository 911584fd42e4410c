"""The decode operations on an NVIDIA GPU; run with JAX_PLATFORMS=cuda pytest -m gpu -n 0."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import assert_close, assert_numerics, make_case

from pallas_kernels import decode_attention, paired_decode_attention
from pallas_kernels.paired_decode_attention import reference, triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu",
        reason="needs an NVIDIA GPU of compute capability 8.0 or higher and JAX_PLATFORMS=cuda",
    ),
]

CACHES = ("bfloat16", "int8", "float8_e4m3fn")
CASES = {
    "every edge of the window": {"lengths": [0, 1, 127, 128, 129, 1000], "S": 1000, "W": 128, "N": 8, "K": 2, "H": 128},
    "one token": {"lengths": [1], "S": 1, "W": 1, "N": 8, "K": 8, "H": 64},
    "no grouped heads, ragged": {"lengths": [2048, 700, 3], "S": 2048, "W": 16, "N": 4, "K": 4, "H": 64},
    "head size 256": {"lengths": [777, 640], "S": 800, "W": 65, "N": 6, "K": 2, "H": 256},
    "64 rows, window beyond the cache": {"lengths": [900, 513], "S": 1024, "W": 4096, "N": 32, "K": 1, "H": 128},
    "short in a long cache": {"lengths": [20000, 65], "S": 40000, "W": 128, "N": 4, "K": 1, "H": 128},
}


def run(case, impl, dtype=jnp.bfloat16):
    operation = partial(paired_decode_attention, window=case.window, impl=impl, **case.scales)
    return jax.jit(operation)(*case.arrays(dtype))


@pytest.mark.parametrize("impl", ["triton", "xla"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", CASES)
def test_numerics_rule(name, cache, impl):
    """The cache holds NaN beyond every length, in all of these tests."""
    case = make_case(**CASES[name], cache=cache)
    found = run(case, impl)
    assert_numerics(found, case)
    for x in found:
        assert (np.asarray(x)[case.lengths == 0] == 0).all()


@pytest.mark.parametrize("cache", CACHES)
def test_float16_queries(cache):
    case = make_case(**CASES["every edge of the window"], cache=cache)
    assert_numerics(run(case, "triton", jnp.float16), case, jnp.float16)


@pytest.mark.parametrize("cache", CACHES)
def test_long_cache_and_equal_bits(cache):
    case = make_case(lengths=[131072], S=131072, W=128, N=8, K=2, H=128, cache=cache)
    found, again = run(case, "triton"), run(case, "triton")
    assert_numerics(found, case)
    for x, y in zip(found, again, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize(
    "config",
    [
        triton.Config(block=32, num_stages=2, programs=4000, least=32),
        triton.Config(block=128, num_warps=8, num_stages=2, programs=1, most=2**20),
        triton.Config(block=64, num_warps=2, num_stages=4, most=100, least=64),
    ],
    ids=["many splits", "one split", "a block a split"],
)
@pytest.mark.parametrize("cache", CACHES)
def test_division_of_the_work_does_not_matter(cache, config):
    case = make_case(**CASES["every edge of the window"], cache=cache)
    q_ctx, q_out, k, v, lengths = case.arrays(jnp.bfloat16)
    ones = np.ones(k.shape[:2], np.float32)
    k_scale, v_scale = (jnp.asarray(case.scales.get(name, ones)) for name in ("k_scale", "v_scale"))
    rows, windows = jnp.stack((q_ctx, q_out), axis=1), (case.window, k.shape[2])
    out = triton.attention(rows, windows, k, v, lengths, k_scale, v_scale, k.shape[3] ** -0.5, config)
    assert_numerics((out[:, 0], out[:, 1]), case)


@pytest.mark.parametrize("cache", CACHES)
def test_cache_of_more_than_2_to_the_31_elements(cache):
    """17 heads of a million keys; only what lies below the length is more than filling."""
    small = make_case(lengths=[1500], S=1500, W=128, N=17, K=17, H=128, cache=cache)
    q_ctx, q_out, k, v, lengths = small.arrays(jnp.bfloat16)
    filling = 127 if cache == "int8" else jnp.nan
    k, v = (jnp.full((1, 17, 2**20, 128), filling, x.dtype).at[:, :, :1500].set(x) for x in (k, v))
    assert k.size > 2**31
    operation = partial(paired_decode_attention, window=small.window, impl="triton", **small.scales)
    assert_numerics(jax.jit(operation)(q_ctx, q_out, k, v, lengths), small)


@pytest.mark.parametrize("impl", ["triton", "xla"])
@pytest.mark.parametrize("window", [None, 128])
def test_one_row(window, impl):
    case = make_case(**CASES["every edge of the window"])
    q_ctx, q_out, *cache = case.arrays(jnp.bfloat16)
    operation = jax.jit(partial(decode_attention, window=window, impl=impl))
    found = operation(q_ctx if window else q_out, *cache)
    q = case.q_ctx if window else case.q_out
    expected = reference.decode_attention(q, case.k_cache, case.v_cache, case.lengths, window=window)
    # The output is rounded to 8 bits and so are the weights of its values, of up to 4.
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=0.03)
    paired = run(case, impl)[0 if window else 1]
    np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(paired, np.float64), atol=0.03)


def test_xla_in_float32():
    case = make_case(**CASES["every edge of the window"])
    assert_close(run(case, "xla", jnp.float32), case, tolerance=2e-5)
