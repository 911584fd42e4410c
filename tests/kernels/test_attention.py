"""Values and gradients of the attention operations, on every backend that runs on a CPU."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import NAMES, assert_blind_rows_are_zero, assert_numerics, make_case, run

from pallas_kernels import cross_attention, dual_stream_attention, sliding_window_attention
from pallas_kernels.dual_stream_attention import reference

BACKENDS = ("xla", "tpu")

CASES = {
    "one row": make_case(B=1, T=1, W=1, N=1, K=1),
    "one block exactly": make_case(T=64, W=2),
    "no segments, window 1, one output row": make_case(T=70, W=1, P=1, N=4, K=2, out_index=[[69], [3]]),
    "window 127, one document": make_case(T=200, W=127, segments=[[(1, 200)], [(7, 200)]]),
    "window 128, packed, padded": make_case(
        T=300, W=128, N=4, K=1, segments=[[(1, 1), (2, 1), (3, 190), (4, 90)], [(1, 299), (2, 1)]]
    ),
    "window 129, a row of padding": make_case(T=192, W=129, N=3, K=1, segments=[[(1, 180)], []]),
    "window T": make_case(T=130, W=130, H=16),
    "window beyond T": make_case(B=1, T=90, W=1000),
    "documents of length 1": make_case(
        T=67, W=3, segments=[[(i + 1, 1) for i in range(67)], [(1, 33), (2, 1), (3, 33)]]
    ),
    "output rows repeated and padded": make_case(
        T=150, W=20, P=7, N=4, K=2, segments=[[(1, 60), (2, 80)], [(2, 150)]],
        out_index=[[0, 5, 5, 60, 139, 140, -1], [64, 64, 127, 128, 149, -1, -1]],
    ),
    "output rows in any order, none visible": make_case(
        T=66, W=64, P=7, out_index=[[65, 0, 31, 64, -1, 2, 63], [-1] * 7]
    ),
    "more output rows than keys": make_case(
        B=1, T=20, W=4, P=70, out_index=np.sort(np.arange(70) % 20)[None]
    ),
    "output window": make_case(
        T=140, W=5, out_window=65, N=4, K=4, segments=[[(1, 70), (3, 70)], [(1, 139)]]
    ),
}  # fmt: skip

RULE_CASES = {
    "packed": make_case(T=200, W=16, N=4, K=1, H=64, segments=[[(1, 1), (2, 90), (3, 100)], [(1, 199), (2, 1)]]),
    "output rows": make_case(B=1, T=150, W=100, P=70, H=64, out_index=[[*range(0, 130, 2), 149, 149, -1, -1, -1]]),
    "rows of one and two keys": make_case(B=1, T=140, W=2, out_window=129, N=2, K=1, H=128),
}


# A case costs an interpreted backend seconds, for its compilation: the others have their like in test_tpu.py.
INTERPRETED_CASES = {
    "one row",
    "no segments, window 1, one output row",
    "window 127, one document",
    "window 128, packed, padded",
    "window 129, a row of padding",
    "window beyond T",
    "documents of length 1",
    "output rows repeated and padded",
}


def attention_of(case, impl, **kwargs):
    return partial(dual_stream_attention, impl=impl, **case.mask, **kwargs)


@pytest.mark.parametrize(
    ("name", "impl"),
    [(name, impl) for impl in BACKENDS for name in CASES if impl == "xla" or name in INTERPRETED_CASES],
)
def test_matches_reference(name, impl):
    case = CASES[name]
    found, truth = run(attention_of(case, impl), case, jnp.float32), case.truth()
    for key in NAMES:
        np.testing.assert_allclose(found[key], truth[key], rtol=2e-5, atol=2e-5, err_msg=key)
    assert_blind_rows_are_zero(found, case)


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("name", RULE_CASES)
def test_numerics_rule_in_bfloat16(name, impl):
    assert_numerics(attention_of(RULE_CASES[name], impl), RULE_CASES[name])


@pytest.mark.parametrize("impl", BACKENDS)
def test_products_of_float32_ask_for_full_precision(impl):
    """A CPU always gives it; a GPU or TPU would take TF32 or bfloat16 passes."""
    case = CASES["window T"]

    def gradients(*arrays):
        values, pull_back = jax.vjp(attention_of(case, impl), *arrays)
        return pull_back(values)

    text = str(jax.make_jaxpr(gradients)(*case.arrays))
    # Two products forward and five backward for each of the two streams, or more where a kernel repeats some.
    products = text.count("dot_general[")
    assert products == text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") >= 14


@pytest.mark.parametrize("impl", BACKENDS)
def test_single_streams_are_the_two_halves(impl):
    case = CASES["output rows repeated and padded"]

    @jax.jit
    def both_ways(q_ctx, q_out, k, v):
        packed = {"segment_ids": jnp.asarray(case.segment_ids), "impl": impl}
        indexed = {"out_index": jnp.asarray(case.out_index), **packed}
        sliding = sliding_window_attention(q_ctx, k, v, window=case.window, **packed)
        cross = cross_attention(q_out, k, v, **indexed)
        narrow = cross_attention(q_out, k, v, window=case.window, **indexed)
        dual = dual_stream_attention(q_ctx, q_out, k, v, impl=impl, **case.mask)
        return (sliding, cross), dual, narrow

    separate, dual, narrow = both_ways(*case.arrays)
    for found, expected in zip(separate, dual, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(narrow - dual[1]).max() > 0.1


@pytest.mark.parametrize("impl", BACKENDS)
def test_cross_attention_is_causal_attention_without_index(impl):
    q, _, k, v = CASES["window T"].arrays
    expected = reference.attention(q, k, v, np.tri(130, dtype=bool)[None].repeat(2, axis=0))
    found = jax.jit(partial(cross_attention, impl=impl))(q, k, v)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("impl", BACKENDS)
def test_scale(impl):
    """A scale of 1/4 in place of 8 ** -0.5 is a factor on the queries."""
    case = CASES["one block exactly"]
    q_ctx, q_out, k, v = case.arrays
    factor = 0.25 * 8**0.5
    found = jax.jit(attention_of(case, impl, scale=0.25))(*case.arrays)
    expected = reference.dual_stream_attention(factor * q_ctx, factor * q_out, k, v, **case.mask)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("impl", BACKENDS)
def test_window_edge(impl):
    """Equal scores and one-hot values show which keys are averaged."""
    q = k = jnp.zeros((1, 8, 1, 8))
    v = jnp.eye(8)[None, :, None, :]
    attend = jax.jit(partial(sliding_window_attention, window=4, impl=impl))
    average = np.asarray(attend(q, k, v))[0, :, 0]
    np.testing.assert_array_equal(average[7], [0, 0, 0, 0, 0.25, 0.25, 0.25, 0.25])
    np.testing.assert_allclose(average[2], [1 / 3, 1 / 3, 1 / 3, 0, 0, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("impl", BACKENDS)
def test_documents_are_isolated_and_calls_repeat_to_the_bit(impl):
    case = make_case(T=150, W=20, B=1, segments=[[(1, 70), (2, 75)]])
    rng = np.random.default_rng(1)

    def disturbed(array):
        array = array.copy()
        array[:, :70] = 50 * rng.normal(size=array[:, :70].shape)
        return array

    other = replace(
        case,
        arrays=tuple(disturbed(x) for x in case.arrays),
        cotangents=tuple(disturbed(x) for x in case.cotangents),
    )

    @jax.jit
    def values_and_grads(arrays, cotangents):
        values, pull_back = jax.vjp(attention_of(case, impl), *arrays)
        return (*values, *pull_back(cotangents))

    results = [values_and_grads(c.arrays, c.cotangents) for c in (case, case, other)]
    for before, again, after in zip(*results, strict=True):
        np.testing.assert_array_equal(before, again)
        np.testing.assert_array_equal(before[:, 70:], after[:, 70:])
        assert (before[:, :70] != after[:, :70]).any()


@pytest.mark.parametrize("impl", BACKENDS)
def test_key_gradients_are_rounded_once(impl):
    """Four rows give dv = 1 + 3/512: rounding to bfloat16 on the way, with a step of 1/128, would lose it."""
    q = jnp.zeros((1, 1, 2, 8), jnp.bfloat16)
    k = v = jnp.zeros((1, 1, 1, 8), jnp.bfloat16)
    d_ctx = jnp.asarray([1.0, 2**-9], jnp.bfloat16)[None, None, :, None] * jnp.ones_like(q)
    d_out = jnp.full_like(q, 2**-9)

    @jax.jit
    def v_gradient(d_ctx, d_out):
        _, pull_back = jax.vjp(partial(dual_stream_attention, window=1, impl=impl), q, q, k, v)
        return pull_back((d_ctx, d_out))[3]

    assert (v_gradient(d_ctx, d_out) == 1 + 1 / 128).all()


def test_reference_gradient_by_finite_differences():
    case = make_case(
        T=9, W=3, B=2, P=5, N=4, K=2, H=3, segments=[[(1, 4), (2, 4)], [(1, 9)]],
        out_index=[[0, 3, 3, 6, -1], [2, 5, 7, 8, 8]],
    )  # fmt: skip
    arrays = [x.astype(np.float64) for x in case.arrays]

    def loss(arrays):
        values = reference.dual_stream_attention(*arrays, **case.mask)
        return sum(np.sum(value * cotangent) for value, cotangent in zip(values, case.cotangents, strict=True))

    grads = reference.dual_stream_attention_grad(*arrays, *case.cotangents, **case.mask)
    for array, grad in zip(arrays, grads, strict=True):
        for index in np.ndindex(array.shape):
            kept = array[index]
            array[index] = kept + 1e-5
            above = loss(arrays)
            array[index] = kept - 1e-5
            slope = (above - loss(arrays)) / 2e-5
            array[index] = kept
            assert abs(slope - grad[index]) < 1e-7
