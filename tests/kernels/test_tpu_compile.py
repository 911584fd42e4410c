"""The TPU kernels compiled for TPUs that are not there: they fit the chip, take linear memory, and the compiler
accepts them inside JAX's transformations.

Needs libtpu, which compiles on any Linux machine.
"""

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import cross_attention, dual_stream_attention
from pallas_kernels.dual_stream_attention import tpu

pytest.importorskip(
    "libtpu",
    reason="needs libtpu: pip install 'libtpu==0.0.48.*' with JAX 0.11.2, 'libtpu==0.0.42.*' with JAX 0.10.2",
)

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}

# B, T, N, K, H: the layers of the reference run, of a long context, and of heads of half a register.
SHAPES = {"1b3": (8, 2048, 16, 16, 128), "long": (1, 16384, 32, 8, 128), "narrow": (8, 2048, 32, 32, 64)}


@pytest.fixture(autouse=True)
def accept_any_device(monkeypatch):
    monkeypatch.setattr(tpu, "unsupported", lambda *_: None)


@pytest.fixture(scope="module")
def chips():
    """Four devices of each kind. libtpu locks its machine against a second process, unless told that none has a TPU."""
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
    return {chip: topologies.get_topology_desc(topology, platform="tpu").devices for chip, topology in CHIPS.items()}


def _mesh(devices):
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


def _arguments(mesh, batch, length, num_heads, num_kv_heads, head_size, dtype=jnp.bfloat16):
    """Queries of both streams, keys, values, segment ids, rows of the output stream, gradients of both outputs."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    q = jax.ShapeDtypeStruct((batch, length, num_heads, head_size), dtype, sharding=sharding)
    k = jax.ShapeDtypeStruct((batch, length, num_kv_heads, head_size), dtype, sharding=sharding)
    index = jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=sharding)
    return q, q, k, k, index, index, q, q


def _values_and_grads(q_ctx, q_out, k, v, segment_ids, out_index, d_ctx, d_out):
    mask = {"window": 128, "segment_ids": segment_ids, "out_index": out_index}
    values, pull_back = jax.vjp(partial(dual_stream_attention, impl="tpu", **mask), q_ctx, q_out, k, v)
    return values, pull_back((d_ctx, d_out))


def _compile(function, mesh, arguments) -> Any:
    with jax.set_mesh(mesh):
        return jax.jit(function).lower(*arguments).compile()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chip", CHIPS)
def test_production_shapes_fit(chip, shape, chips):
    mesh = _mesh(chips[chip][:1])
    memory = _compile(_values_and_grads, mesh, _arguments(mesh, *SHAPES[shape])).memory_analysis()
    # Head-major copies of arguments and results, which a head size of 64 doubles, and nothing of size T * T.
    lanes = 128 // SHAPES[shape][-1]
    assert memory.temp_size_in_bytes < lanes * (memory.argument_size_in_bytes + memory.output_size_in_bytes)


def test_the_largest_blocks_fit(chips):
    """Float32 and the widest heads, on the chip with the least on-chip memory."""
    mesh = _mesh(chips["v5p"][:1])
    q, _, k, v, segment_ids, out_index, *_ = _arguments(mesh, 1, 1100, 2, 1, 256, jnp.float32)

    def gradients(q, k, v, segment_ids, out_index):
        attend = partial(cross_attention, segment_ids=segment_ids, out_index=out_index, impl="tpu")
        values, pull_back = jax.vjp(attend, q, k, v)
        return pull_back(values)

    _compile(gradients, mesh, (q, k, v, segment_ids, out_index))


@pytest.mark.parametrize(
    ("saved", "kernels"),
    [(("attention_output", "attention_lse"), 5), (("attention_output",), 7)],
)
def test_saved_names_spare_the_backward_pass_the_forward(saved, kernels, chips):
    """Two forward kernels, a backward one for each stream's queries, and one for the keys, on each of four chips."""
    mesh = _mesh(chips["v5e"])

    def layer(q_ctx, q_out, k, v, segment_ids, out_index):
        mask = {"window": 128, "segment_ids": segment_ids, "out_index": out_index}
        return dual_stream_attention(q_ctx, q_out, k, v, impl="tpu", **mask)

    def values_and_grads(*arguments):
        *inputs, d_ctx, d_out = arguments
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        values, pull_back = jax.vjp(jax.checkpoint(layer, policy=policy), *inputs)
        return values, pull_back((d_ctx, d_out))[:4]

    over_batch = jax.shard_map(values_and_grads, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
    text = _compile(over_batch, mesh, _arguments(mesh, 4, 1024, 2, 1, 128)).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == kernels
