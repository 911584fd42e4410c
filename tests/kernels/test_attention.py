"""Values and gradients of the attention operations, on every backend that runs on a CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import NAMES, assert_blind_rows_are_zero, assert_numerics, make_case, run

from pallas_kernels import cross_attention, dual_stream_attention, sliding_window_attention
from pallas_kernels.dual_stream_attention import reference

BACKENDS = ("xla",)

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


def attention_of(case, impl, **kwargs):
    return partial(dual_stream_attention, impl=impl, **case.mask, **kwargs)


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name, impl):
    case = CASES[name]
    found, truth = run(attention_of(case, impl), case, jnp.float32), case.truth()
    for key in NAMES:
        np.testing.assert_allclose(found[key], truth[key], rtol=2e-5, atol=2e-5, err_msg=key)
    assert_blind_rows_are_zero(found, case)


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize(
    "name", ["window 128, packed, padded", "output rows repeated and padded", "output window"]
)
def test_numerics_rule_in_bfloat16(name, impl):
    assert_numerics(attention_of(CASES[name], impl), CASES[name])


@pytest.mark.parametrize("impl", BACKENDS)
def test_bfloat16_values_in_float32_keep_full_precision(impl):
    """Products must not fall to bfloat16 or TF32 when the inputs are float32."""
    assert_numerics(attention_of(CASES["window T"], impl), CASES["window T"], jnp.float32)


@pytest.mark.parametrize("impl", BACKENDS)
def test_single_streams_are_the_two_halves(impl):
    case = CASES["output rows repeated and padded"]
    q_ctx, q_out, k, v = (jnp.asarray(x) for x in case.arrays)
    o_ctx, o_out = dual_stream_attention(q_ctx, q_out, k, v, impl=impl, **case.mask)
    sliding = sliding_window_attention(
        q_ctx, k, v, window=case.window, segment_ids=case.segment_ids, impl=impl
    )
    cross = cross_attention(q_out, k, v, segment_ids=case.segment_ids, out_index=case.out_index, impl=impl)
    np.testing.assert_array_equal(sliding, o_ctx)
    np.testing.assert_array_equal(cross, o_out)


@pytest.mark.parametrize("impl", BACKENDS)
def test_cross_attention_is_causal_attention_without_index(impl):
    q_ctx, _, k, v = (jnp.asarray(x) for x in CASES["window T"].arrays)
    expected = jax.nn.dot_product_attention(q_ctx, k, v, is_causal=True, implementation="xla")
    np.testing.assert_allclose(cross_attention(q_ctx, k, v, impl=impl), expected, atol=1e-5)


@pytest.mark.parametrize("impl", BACKENDS)
def test_scale(impl):
    q_ctx, q_out, k, v = (jnp.asarray(x) for x in CASES["one block exactly"].arrays)
    scaled = dual_stream_attention(q_ctx, q_out, k, v, window=9, scale=0.25, impl=impl)
    stretched = dual_stream_attention(
        q_ctx * (0.25 * 8**0.5), q_out * (0.25 * 8**0.5), k, v, window=9, impl=impl
    )
    for found, expected in zip(scaled, stretched, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("impl", BACKENDS)
def test_window_edge(impl):
    """Equal scores and one-hot values show which keys are averaged."""
    q = k = jnp.zeros((1, 8, 1, 8))
    v = jnp.eye(8)[None, :, None, :]
    average = np.asarray(sliding_window_attention(q, k, v, window=4, impl=impl))[0, :, 0]
    np.testing.assert_array_equal(average[7], [0, 0, 0, 0, 0.25, 0.25, 0.25, 0.25])
    np.testing.assert_allclose(average[2], [1 / 3, 1 / 3, 1 / 3, 0, 0, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("impl", BACKENDS)
def test_same_call_gives_same_bits(impl):
    case = CASES["window 128, packed, padded"]
    first, second = (run(attention_of(case, impl, deterministic=True), case, jnp.float32) for _ in range(2))
    for name in NAMES:
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize("impl", BACKENDS)
def test_documents_are_isolated_to_the_bit(impl):
    case = make_case(T=150, W=20, B=1, segments=[[(1, 70), (2, 75)]])
    rng = np.random.default_rng(1)

    def disturbed(array):
        array = array.copy()
        array[:, :70] = 50 * rng.normal(size=array[:, :70].shape)
        return array

    other = make_case(T=150, W=20, B=1, segments=[[(1, 70), (2, 75)]])
    object.__setattr__(other, "arrays", tuple(disturbed(x) for x in case.arrays))
    object.__setattr__(other, "cotangents", tuple(disturbed(x) for x in case.cotangents))
    before, after = (run(attention_of(case, impl), c, jnp.float32) for c in (case, other))
    for name in NAMES:
        np.testing.assert_array_equal(before[name][:, 70:], after[name][:, 70:])
        assert (before[name][:, :70] != after[name][:, :70]).any()


@pytest.mark.parametrize("impl", BACKENDS)
def test_key_gradients_are_rounded_once(impl):
    """Four rows give dv = 1 + 3/512: any bfloat16 rounding on the way, whose step at 1 is 1/128, would lose it."""
    q = jnp.zeros((1, 1, 2, 8), jnp.bfloat16)
    k = v = jnp.zeros((1, 1, 1, 8), jnp.bfloat16)
    d_ctx = jnp.asarray([1.0, 2**-9], jnp.bfloat16)[None, None, :, None] * jnp.ones_like(q)
    d_out = jnp.full_like(q, 2**-9)
    _, pull_back = jax.vjp(partial(dual_stream_attention, window=1, impl=impl), q, q, k, v)
    assert (pull_back((d_ctx, d_out))[3] == 1 + 1 / 128).all()


def test_reference_gradient_by_finite_differences():
    case = make_case(
        T=9, W=3, B=2, P=5, N=4, K=2, H=3, segments=[[(1, 4), (2, 4)], [(1, 9)]],
        out_index=[[0, 3, 3, 6, -1], [2, 5, 7, 8, 8]],
    )  # fmt: skip
    arrays = [x.astype(np.float64) for x in case.arrays]

    def loss(arrays):
        values = reference.dual_stream_attention(*arrays, **case.mask)
        return sum(
            np.sum(value * cotangent) for value, cotangent in zip(values, case.cotangents, strict=True)
        )

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
