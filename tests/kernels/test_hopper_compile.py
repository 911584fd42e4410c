"""The Hopper kernels at production shapes, compiled ahead of time for an H200 that need not be there.

The compiler itself refuses a kernel that asks for more shared memory than a multiprocessor has.
"""

import importlib.util
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from orthros_jax.compilation.topology import open_topology
from pallas_kernels import dual_stream_attention
from pallas_kernels.dual_stream_attention import hopper

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jax.__version_info__[:2] != (0, 11), reason="needs Python 3.12 and JAX 0.11"),
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the packages of requirements-kernels.txt"
    ),
]

SHAPES = {
    "B8 T2048 N16 K16 H128": (8, 2048, 16, 16, 128),
    "B8 T2048 N32 K32 H64": (8, 2048, 32, 32, 64),
    "B1 T16384 N32 K8 H128": (1, 16384, 32, 8, 128),
}

MAX_SPILL_BYTES = 160
"""Register spills of any one kernel. Only the gradients of keys and values spill, at H 128."""


def _compile_step(batch, num_keys, num_heads, num_kv_heads, head_size, *, packed) -> Any:
    """Both streams and the gradients of all inputs, compiled for one H200."""
    sharding: Any = SingleDeviceSharding(open_topology("h200:1").devices[0])

    def step(queries, k, v, cotangents, segment_ids):
        def attention(queries, k, v):
            q_ctx, q_out = queries
            return dual_stream_attention(q_ctx, q_out, k, v, window=128, segment_ids=segment_ids, impl="hopper")

        outputs, pull_back = jax.vjp(attention, queries, k, v)
        return outputs, pull_back(cotangents)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    queries = (array(batch, num_keys, num_heads, head_size),) * 2
    keys = array(batch, num_keys, num_kv_heads, head_size)
    segment_ids = array(batch, num_keys, dtype=jnp.int32) if packed else None
    return jax.jit(step).lower(queries, keys, keys, queries, segment_ids).compile()


@pytest.mark.parametrize(("name", "packed"), [*((name, False) for name in SHAPES), ("B8 T2048 N16 K16 H128", True)])
def test_shared_memory_spills_and_memory(name, packed, monkeypatch, capfd):
    monkeypatch.setattr(hopper, "unsupported", lambda *_: None)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    step = _compile_step(*SHAPES[name], packed=packed)

    spills = [int(n) for n in re.findall(r"stack frame, (\d+) bytes spill stores", capfd.readouterr().out)]
    assert len(spills) >= 4, "a kernel was not reported"
    assert max(spills) <= MAX_SPILL_BYTES, spills

    # Statistics of rows are all that is held beside inputs, outputs and gradients: no array over pairs of rows, and no
    # second copy of a gradient of keys or values, which would alone be larger.
    batch, num_keys, num_heads, num_kv_heads, head_size = SHAPES[name]
    num_rows = batch * num_keys * num_heads
    allowed = 5 * num_rows * jnp.dtype(jnp.float32).itemsize
    assert allowed < batch * num_keys * num_kv_heads * head_size * jnp.dtype(jnp.bfloat16).itemsize
    assert step.memory_analysis().temp_size_in_bytes <= allowed
