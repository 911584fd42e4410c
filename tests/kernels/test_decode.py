"""The decode operations on every backend that runs on a CPU, the refusals, and the mistakes in a call."""

import logging
from functools import partial
from importlib import metadata
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import assert_close, assert_numerics, make_case, without_keys
from jax.sharding import PartitionSpec as P

from pallas_kernels import decode_attention, dispatch, paired_decode_attention
from pallas_kernels.paired_decode_attention import reference, triton, xla

BACKENDS = ("xla",)
NO_GPU = "it needs an NVIDIA GPU, and the device is cpu"
NO_TPU = "it needs a TPU, and the device is cpu"

CASES = {
    "one token": make_case(lengths=[1], S=1, W=1),
    "every edge of the window": make_case(lengths=[0, 1, 7, 8, 9, 40], S=40, W=8, N=4, K=2),
    "grouped heads, window of one": make_case(lengths=[37, 5], S=37, W=1, N=6, K=2),
    "window beyond the cache": make_case(lengths=[33, 48], S=48, W=1000, N=4, K=1),
    "window of the cache": make_case(lengths=[48, 47], S=48, W=48),
    "nothing but empty sequences": make_case(lengths=[0, 0], S=16, W=4),
    "int8": make_case(lengths=[0, 1, 40, 64], S=64, W=8, N=4, K=2, cache="int8"),
    "float8": make_case(lengths=[0, 1, 40, 64], S=64, W=8, N=4, K=2, cache="float8_e4m3fn"),
}
RULE_CASES = {
    cache: make_case(lengths=[300, 129, 31], S=300, W=128, N=4, K=2, H=64, cache=cache)
    for cache in ("bfloat16", "int8", "float8_e4m3fn")
}


@pytest.fixture(params=[None, 16], ids=["one block", "blocks of 16"])
def block(request, monkeypatch):
    """The tests' caches are short: blocks of 16 keys, the last of which may overlap, are what long ones meet."""
    if request.param is not None:
        monkeypatch.setattr(xla, "_BLOCK", request.param)


def run(case, impl, dtype=jnp.float32):
    operation = partial(paired_decode_attention, window=case.window, impl=impl, **case.scales)
    outputs = jax.jit(operation)(*case.arrays(dtype))
    assert [x.dtype for x in outputs] == [jnp.dtype(dtype)] * 2
    return outputs


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_matches_reference_and_never_reads_beyond_the_lengths(name, impl):
    assert_close(run(CASES[name], impl), CASES[name], tolerance=2e-5)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("name", RULE_CASES)
def test_numerics_rule_in_bfloat16(name, impl):
    assert_numerics(run(RULE_CASES[name], impl, jnp.bfloat16), RULE_CASES[name])


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 12, 1000])
def test_one_row(window, impl):
    case = CASES["every edge of the window"]
    q, _, *cache = case.arrays(jnp.float32)
    found = jax.jit(partial(decode_attention, window=window, impl=impl))(q, *cache)
    expected = reference.decode_attention(case.q_ctx, *case.cache, case.lengths, window=window)
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("impl", BACKENDS)
def test_blocks_before_the_window_are_not_read(impl, monkeypatch):
    monkeypatch.setattr(xla, "_BLOCK", 16)
    case = without_keys(make_case(lengths=[40], S=40, W=8), before=16)
    q, _, *cache = case.arrays(jnp.float32)
    found = jax.jit(partial(decode_attention, window=12, impl=impl))(q, *cache)
    expected = reference.decode_attention(case.q_ctx, case.k_cache, case.v_cache, case.lengths, window=12)
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("impl", BACKENDS)
def test_scale(impl):
    case = CASES["grouped heads, window of one"]
    found = jax.jit(partial(paired_decode_attention, window=1, scale=1.5, impl=impl))(*case.arrays(jnp.float32))
    for x, y in zip(found, case.truth(scale=1.5), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


def test_reference_by_a_second_formula():
    """Equal scores and one-hot values show which keys are averaged; a scale of 2 on the values doubles the mean."""
    q, k = np.zeros((1, 2, 8)), np.zeros((1, 1, 8, 8))
    ones = np.ones((1, 1))
    v = np.eye(8)[None, None]
    context, output = reference.paired_decode_attention(
        q, q, k, v, np.asarray([6]), window=4, k_scale=ones, v_scale=2 * ones
    )
    np.testing.assert_allclose(context[0, 1], [0, 0, 0.5, 0.5, 0.5, 0.5, 0, 0])
    np.testing.assert_allclose(output[0, 1], [1 / 3] * 6 + [0, 0])


def test_products_of_float32_ask_for_full_precision():
    """A CPU always gives it; a GPU or TPU would take TF32 or bfloat16 passes."""
    arrays = CASES["int8"].arrays(jnp.float32)
    operation = partial(paired_decode_attention, window=8, impl="xla", **CASES["int8"].scales)
    text = str(jax.make_jaxpr(operation)(*arrays))
    assert text.count("dot_general") == text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_xla_makes_no_second_cache(dtype):
    """Nothing as large as the cache is allocated, in any type: a CPU would like to upcast all of it."""
    q, cache = _array(1, 4, 64), _array(1, 2, 2**17, 64, dtype=dtype)
    scales = {"k_scale": _array(1, 2, dtype=jnp.float32), "v_scale": _array(1, 2, dtype=jnp.float32)}

    def operation(q, cache, lengths, scales):
        return paired_decode_attention(q, q, cache, cache, lengths, window=128, impl="xla", **scales)

    lowered = jax.jit(operation).lower(q, cache, LENGTH, scales if dtype == jnp.int8 else {})
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < cache.size * cache.dtype.itemsize / 2


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("name", ["every edge of the window", "int8"])
def test_split_over_batch_and_heads(name, impl):
    """Each device has some sequences and some heads; the result is the one without a mesh."""
    case = CASES[name]
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    both = P("data", "tensor")

    def operation(q_ctx, q_out, k, v, lengths, scales):
        return paired_decode_attention(q_ctx, q_out, k, v, lengths, window=case.window, impl=impl, **scales)

    split = jax.jit(
        jax.shard_map(operation, mesh=mesh, in_specs=(both, both, both, both, P("data"), both), out_specs=both)
    )
    arrays = case.arrays(jnp.float32)
    for x, y in zip(split(*arrays, case.scales), jax.jit(operation)(*arrays, case.scales), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


def _array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


LENGTH = _array(1, dtype=jnp.int32)
Q, CACHE = _array(1, 4, 64), _array(1, 2, 8, 64)
CACHE8, SCALES = _array(1, 2, 8, 64, dtype=jnp.int8), _array(1, 2, dtype=jnp.float32)


def _trace(operation, *arrays, k_scale=None, v_scale=None, **kwargs):
    scales = {name: x for name, x in (("k_scale", k_scale), ("v_scale", v_scale)) if x is not None}
    return jax.eval_shape(lambda arrays, scales: operation(*arrays, **scales, **kwargs), arrays, scales)


def test_auto_takes_xla_on_a_cpu_and_says_so_once(caplog):
    dispatch.log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        for _ in range(2):
            _trace(paired_decode_attention, Q, Q, CACHE, CACHE, LENGTH, window=3)
        _trace(decode_attention, Q, CACHE, CACHE, LENGTH)
    assert caplog.messages == [
        f"paired_decode_attention: impl=auto takes xla; not triton: {NO_GPU}; not tpu: {NO_TPU}",
        f"decode_attention: impl=auto takes xla; not triton: {NO_GPU}; not tpu: {NO_TPU}",
    ]


def test_forced_backend_never_falls_back():
    with pytest.raises(NotImplementedError) as error:
        _trace(decode_attention, Q, CACHE, CACHE, LENGTH, impl="triton")
    assert str(error.value) == f"decode_attention: impl='triton' is not possible here: {NO_GPU}"


def _pretend(monkeypatch, capability="9.0", version: str | None = "0.3.1"):
    """An NVIDIA GPU of that compute capability, and jax-triton of that version."""
    client = SimpleNamespace(platform_version="cuda 13000")
    device = SimpleNamespace(client=client, compute_capability=capability, device_kind="NVIDIA X")
    monkeypatch.setattr(jax, "devices", lambda: [device])

    def installed(name):
        assert name == "jax-triton"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)


@pytest.mark.parametrize(
    ("pretend", "q", "cache", "reason"),
    [
        ({}, _array(1, 2, 4, 64), CACHE, None),
        ({"capability": "8.0"}, _array(1, 2, 4, 64, dtype=jnp.float16), CACHE8, None),
        ({}, _array(1, 2, 32, 128), _array(1, 1, 8, 128), None),
        ({}, _array(1, 1, 4, 256), _array(1, 2, 8, 256, dtype=jnp.float8_e4m3fn), None),
        ({"capability": "7.5"}, _array(1, 2, 4, 64), CACHE, "it needs compute capability 8.0, and NVIDIA X has 7.5"),
        (
            {"capability": "8.6"},
            _array(1, 2, 4, 64),
            _array(1, 2, 8, 64, dtype=jnp.float8_e4m3fn),
            "it needs compute capability 8.9, and NVIDIA X has 8.6",
        ),
        (
            {},
            _array(1, 2, 4, 64, dtype=jnp.float32),
            CACHE8,
            "it needs bfloat16 or float16 queries, and they are float32",
        ),
        ({}, _array(1, 2, 4, 96), _array(1, 2, 8, 96), "it needs a head size of 64, 128 or 256, and it is 96"),
        (
            {},
            _array(1, 2, 66, 64),
            _array(1, 2, 8, 64),
            "it needs at most 64 rows for each key/value head, and there are 66",
        ),
        (
            {"version": None},
            _array(1, 2, 4, 64),
            CACHE,
            "jax-triton is not installed (pip install jax-triton==0.3.1)",
        ),
        (
            {"version": "0.4.1"},
            _array(1, 2, 4, 64),
            CACHE,
            "it needs jax-triton 0.3.1, and 0.4.1 is installed (pip install jax-triton==0.3.1)",
        ),
    ],
)
def test_triton_refusals(monkeypatch, pretend, q, cache, reason):
    _pretend(monkeypatch, **pretend)
    assert triton.unsupported(q, cache) == reason


def test_auto_prefers_triton_where_it_can(monkeypatch, caplog):
    dispatch.log_once.cache_clear()
    _pretend(monkeypatch)
    calls = []
    monkeypatch.setattr(triton, "attention", lambda q, windows, *_: calls.append((q.shape, windows)) or q)
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        _trace(paired_decode_attention, Q, Q, CACHE, CACHE, LENGTH, window=3)
        _trace(decode_attention, Q, CACHE, CACHE, LENGTH, window=9)
    assert calls == [((1, 2, 4, 64), (3, 8)), ((1, 1, 4, 64), (8,))]
    assert caplog.messages == [
        "paired_decode_attention: impl=auto takes triton",
        "decode_attention: impl=auto takes triton",
    ]


@pytest.mark.parametrize(
    ("arrays", "kwargs", "message"),
    [
        ((Q, CACHE, CACHE, LENGTH), {"window": 0}, "a window counts the row's own key and must be at least 1, got 0"),
        (
            (Q, CACHE, _array(1, 2, 9, 64), LENGTH),
            {},
            "decoding needs q [B, N, H] and k_cache, v_cache [B, K, S, H], "
            "got q (1, 4, 64), k_cache (1, 2, 8, 64), v_cache (1, 2, 9, 64)",
        ),
        ((_array(1, 3, 64), CACHE, CACHE, LENGTH), {}, "the 2 key/value heads must divide the 3 query heads"),
        (
            (_array(1, 4, 64, dtype=jnp.int8), CACHE8, CACHE8, LENGTH),
            {},
            "queries must be float32, bfloat16 or float16, got int8",
        ),
        (
            (_array(1, 4, 64, dtype=jnp.float32), CACHE, CACHE, LENGTH),
            {},
            "a cache for float32 queries must be float32, int8 or float8_e4m3fn, got bfloat16, bfloat16",
        ),
        (
            (Q, CACHE, CACHE, _array(1)),
            {},
            "lengths must be an int32 array of shape (1,), got bfloat16 (1,)",
        ),
        (
            (Q, CACHE8, CACHE8, LENGTH),
            {"k_scale": SCALES},
            "an int8 or float8_e4m3fn cache needs v_scale and no other has one, got int8",
        ),
        (
            (Q, CACHE, CACHE, LENGTH),
            {"k_scale": SCALES, "v_scale": SCALES},
            "an int8 or float8_e4m3fn cache needs k_scale and no other has one, got bfloat16",
        ),
        (
            (Q, CACHE8, CACHE8, LENGTH),
            {"k_scale": SCALES, "v_scale": _array(2, dtype=jnp.float32)},
            "v_scale must be a float32 array of shape (1, 2), got float32 (2,)",
        ),
        ((Q, CACHE, CACHE, LENGTH), {"impl": "cudnn"}, "impl must be one of auto, triton, tpu, xla, got 'cudnn'"),
    ],
)
def test_mistakes_in_a_call(arrays, kwargs, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        _trace(decode_attention, *arrays, **kwargs)
    assert str(error.value) == message


def test_both_rows_must_be_alike():
    with pytest.raises(ValueError, match=r"q_ctx and q_out must be alike, got bfloat16 \(1, 4, 64\) and bfloat16"):
        _trace(paired_decode_attention, Q, _array(1, 8, 64), CACHE, CACHE, LENGTH, window=3)
