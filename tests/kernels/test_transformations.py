"""The operations inside JAX's transformations, their memory, and what they visit."""

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from numerics import NAMES, make_case, run

from pallas_kernels import dual_stream_attention, sliding_window_attention

BACKENDS = ("xla", "tpu")


def _compiled_step(num_keys, impl) -> Any:
    def loss(q_ctx, q_out, k, v, segment_ids):
        outputs = dual_stream_attention(q_ctx, q_out, k, v, window=128, segment_ids=segment_ids, impl=impl)
        return sum(jnp.sum(x.astype(jnp.float32)) for x in outputs)

    queries = jax.ShapeDtypeStruct((1, num_keys, 2, 16), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((1, num_keys, 1, 16), jnp.bfloat16)
    segment_ids = jax.ShapeDtypeStruct((1, num_keys), jnp.int32)
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    return step.lower(queries, queries, keys, keys, segment_ids).compile()


@pytest.mark.parametrize("impl", ["xla"])
def test_memory_is_linear_in_length(impl):
    """An interpreted kernel says nothing about memory: test_tpu_compile.py compiles those for a TPU."""
    short, long = (_compiled_step(num_keys, impl) for num_keys in (4096, 8192))
    short_bytes, long_bytes = (step.memory_analysis().temp_size_in_bytes for step in (short, long))
    assert long_bytes <= 2.2 * short_bytes
    shapes = re.findall(r"\w\[([\d,]+)\]", long.as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert largest <= 8192 * 2 * 16, "an array larger than the queries"


@pytest.mark.parametrize("impl", BACKENDS)
def test_keys_outside_the_window_and_the_document_are_not_visited(impl):
    """NaN keys in blocks that no row of a query block sees cannot reach it."""
    block = {"xla": 128, "tpu": 512}[impl]
    k = v = jnp.ones((1, 5 * block, 1, 8)).at[:, :block].set(jnp.nan)
    q = jnp.ones((1, 5 * block, 1, 8))
    segment_ids = jnp.where(jnp.arange(5 * block) < 2 * block, 1, 2)[None]
    attend = jax.jit(partial(dual_stream_attention, window=block // 2, impl=impl))
    o_ctx, o_out = attend(q, q, k, v, segment_ids=segment_ids)
    assert np.isnan(o_ctx[0, :block]).all()
    assert np.isnan(o_out[0, : 2 * block]).all()
    np.testing.assert_allclose(o_ctx[0, 2 * block :], 1.0, rtol=1e-6)
    np.testing.assert_allclose(o_out[0, 2 * block :], 1.0, rtol=1e-6)


@pytest.mark.parametrize(("impl", "check_vma"), [("xla", True), ("xla", False), ("tpu", False)])
def test_shard_map_over_batch_and_heads(impl, check_vma):
    """Pallas's interpreter fails with check_vma: test_tpu_compile.py compiles those kernels with it."""
    case = make_case(T=130, W=20, B=4, N=4, K=2, segments=[[(1, 60), (2, 60)], [(3, 130)], [], [(1, 5)]])
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    heads, rows = PartitionSpec("data", None, "tensor"), PartitionSpec("data")

    def attention(q_ctx, q_out, k, v, segment_ids):
        return dual_stream_attention(q_ctx, q_out, k, v, window=case.window, segment_ids=segment_ids, impl=impl)

    sharded = jax.shard_map(attention, mesh=mesh, in_specs=(*[heads] * 4, rows), out_specs=heads, check_vma=check_vma)
    single = run(partial(dual_stream_attention, impl=impl, **case.mask), case, jnp.float32)
    segment_ids = jnp.asarray(case.segment_ids)
    split = run(lambda q, p, k, v: sharded(q, p, k, v, segment_ids), case, jnp.float32)
    for name in NAMES:
        np.testing.assert_allclose(split[name], single[name], atol=2e-6, err_msg=name)


def _layer(impl, x, weight):
    """One layer of a toy model, x [B, T, D]: a projection and attention with itself."""
    q = (x @ weight).reshape(*x.shape[:2], 2, -1)
    return x + sliding_window_attention(q, q, q, window=9, impl=impl).reshape(x.shape)


@pytest.mark.parametrize("impl", BACKENDS)
def test_scan_over_layers_with_rematerialisation(impl):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 70, 16)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(2, 16, 16)) / 4, jnp.float32)

    def scanned(weights):
        layer = jax.checkpoint(lambda x, weight: (_layer(impl, x, weight), None))
        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    def unrolled(weights):
        return jnp.sum(_layer(impl, _layer(impl, x, weights[0]), weights[1]) ** 2)

    found, expected = (jax.jit(jax.grad(f))(weights) for f in (scanned, unrolled))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", ["xla"])
def test_saved_names_spare_the_backward_pass_the_forward(impl):
    """Loops over query blocks: forward and backward, and once more forward if it is recomputed. JAX leaves it to the
    compiler to drop a kernel that nothing needs: test_tpu_compile.py counts those."""
    x, weight = jnp.ones((1, 256, 16)), jnp.ones((16, 16))

    def loops(policy):
        layer = jax.checkpoint(partial(_layer, impl), policy=policy)
        return str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(layer(x, weight))))(x)).count("scan[")

    names = jax.checkpoint_policies.save_only_these_names
    assert loops(names("attention_output", "attention_lse")) == 2
    assert loops(names("attention_output")) == 3
    assert loops(jax.checkpoint_policies.nothing_saveable) == 3
