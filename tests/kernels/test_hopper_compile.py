"""The Hopper kernels at production shapes, compiled ahead of time for an H200 that need not be there.

The compiler itself refuses a kernel that asks for more shared memory than a multiprocessor has.
"""

import importlib.util
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels import dual_stream_attention
from pallas_kernels.dual_stream_attention import hopper

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jax.__version_info__[:2] != (0, 11), reason="needs Python 3.12 and JAX 0.11"),
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the packages of requirements-kernels.txt"
    ),
]

H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 patch: 0 }
gpu_device_info {
  name: "NVIDIA H200" device_vendor: "NVIDIA Corporation" model_str: "sm_9.0a"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
  core_count: 132 fpus_per_core: 128 threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  device_memory_size: 151397597184 memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_address_bits: 64
}
"""
"""What XLA wants to know of the device, in the text format of its GpuTargetConfigProto."""

SHAPES = {
    "B8 T2048 N16 K16 H128": (8, 2048, 16, 16, 128),
    "B8 T2048 N32 K32 H64": (8, 2048, 32, 32, 64),
    "B1 T16384 N32 K8 H128": (1, 16384, 32, 8, 128),
}

MAX_SPILL_BYTES = 160
"""Register spills of any one kernel. Only the gradients of keys and values spill, at H 128."""


def _compile_step(batch, num_keys, num_heads, num_kv_heads, head_size, *, packed) -> Any:
    """Both streams and the gradients of all inputs, compiled for one H200."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    sharding: Any = SingleDeviceSharding(topology.devices[0])

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
