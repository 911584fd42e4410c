"""The TPU kernel of the decode operations: interpreted on a CPU, and compiled for TPUs where libtpu is installed."""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import assert_close, assert_numerics, make_case, without_keys
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import decode_attention, paired_decode_attention
from pallas_kernels.paired_decode_attention import reference, tpu

CASES = {
    "every edge of the window": make_case(lengths=[0, 1, 7, 8, 9, 40], S=40, W=8, N=4, K=2),
    "more rows than sublanes, window of one": make_case(lengths=[37, 5], S=37, W=1, N=18, K=2),
    "window beyond the cache": make_case(lengths=[33, 48], S=48, W=1000, N=4, K=1),
    "int8": make_case(lengths=[0, 1, 40, 64], S=64, W=8, N=4, K=2, cache="int8"),
    "float8": make_case(lengths=[0, 1, 40, 64], S=64, W=8, N=4, K=2, cache="float8_e4m3fn"),
}


@pytest.fixture
def interpreter(monkeypatch):
    """Pallas interprets the kernel, the backend refuses nothing, and a block of a head size of 16 is 16 keys."""
    monkeypatch.setattr(tpu, "unsupported", lambda *_: None)
    monkeypatch.setattr(tpu, "_block_size", lambda k_cache: min(k_cache.shape[2], 16))
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))


def run(case, dtype=jnp.float32):
    operation = partial(paired_decode_attention, window=case.window, impl="tpu", **case.scales)
    return jax.jit(operation)(*case.arrays(dtype))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", CASES)
def test_matches_reference_and_never_reads_beyond_the_lengths(name):
    assert_close(run(CASES[name]), CASES[name], tolerance=2e-5)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("cache", ["bfloat16", "int8", "float8_e4m3fn"])
def test_numerics_rule_in_bfloat16(cache):
    case = make_case(lengths=[100, 79, 31], S=100, W=48, N=4, K=2, H=128, cache=cache)
    assert_numerics(run(case, jnp.bfloat16), case)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("window", [None, 12])
def test_one_row_and_nothing_before_its_blocks(window):
    case = CASES["every edge of the window"] if window is None else without_keys(CASES["window beyond the cache"], 32)
    q, _, *cache = case.arrays(jnp.float32)
    found = jax.jit(partial(decode_attention, window=window, impl="tpu"))(q, *cache)
    expected = reference.decode_attention(case.q_ctx, case.k_cache, case.v_cache, case.lengths, window=window)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_steps_without_keys_fetch_nothing():
    """Consecutive steps that name the same block fetch it once: at most the blocks that a row sees, or one."""

    def fetched(length, windows):
        blocks = [int(tpu.block_to_fetch(j, jnp.int32(length), windows, 16)) for j in range(8)]
        return sorted(set(blocks))

    assert fetched(0, (8, 128)) == [0]
    assert fetched(33, (8, 128)) == [0, 1, 2]
    assert fetched(128, (8, 128)) == list(range(8))
    assert fetched(100, (12,)) == [5, 6]


@pytest.mark.parametrize(
    ("head_size", "dtype", "reason"),
    [
        (128, jnp.bfloat16, None),
        (256, jnp.float32, None),
        (64, jnp.bfloat16, "it needs a head size of 128 or 256, and it is 64"),
        (128, jnp.float16, "it needs float32 or bfloat16 queries, and they are float16"),
    ],
)
def test_refusals(monkeypatch, head_size, dtype, reason):
    class Device:
        platform = "tpu"
        device_kind = "TPU v5 lite"

    monkeypatch.setattr(jax, "devices", lambda: [Device])
    q = jnp.zeros((1, 2, 4, head_size), dtype)
    assert tpu.unsupported(q, q) == reason


def test_refuses_another_platform():
    q = jnp.zeros((1, 2, 4, 128), jnp.bfloat16)
    assert tpu.unsupported(q, q) == "it needs a TPU, and the device is cpu"


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (pip install jax[tpu])")
@pytest.mark.parametrize("cache", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(2, 32, 8, 128), (1, 16, 16, 128), (2, 8, 4, 256)], ids=str)
@pytest.mark.parametrize("chip", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_compiles_without_a_copy_of_the_cache(chip, shape, cache, monkeypatch):
    """Split over sequences and heads, two by two devices."""
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    num_rows, num_heads, num_kv_heads, head_size = shape
    devices = topologies.get_topology_desc(chip, platform="tpu").devices
    mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "tensor"))
    windows = (128, 2**16)[-num_rows:]

    def operation(q, k, v, lengths, k_scale, v_scale):
        return tpu.attention(q, windows, k, v, lengths, k_scale, v_scale, 0.1)

    rows, heads = P("data", None, "tensor"), P("data", "tensor")
    specs = (rows, heads, heads, P("data"), heads, heads)
    kv, scales = ((4, num_kv_heads, 2**16, head_size), cache), ((4, num_kv_heads), jnp.float32)
    arrays = ((4, num_rows, num_heads, head_size), jnp.bfloat16), kv, kv, ((4,), jnp.int32), scales, scales
    arguments = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(arrays, specs, strict=True)
    )
    split = jax.shard_map(operation, mesh=mesh, in_specs=specs, out_specs=rows)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(split).lower(*arguments)
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2**20
