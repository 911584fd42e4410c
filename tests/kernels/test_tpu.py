"""The TPU kernels: what they compute, what they visit, and cases of several blocks; all interpreted on a CPU."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import jaxprs_in_params
from numerics import NAMES, assert_blind_rows_are_zero, make_case, run

from pallas_kernels import cross_attention, dual_stream_attention, sliding_window_attention
from pallas_kernels.dual_stream_attention import reference, tpu, tpu_tiles, tpu_window

CASES = {
    "packed": make_case(T=1100, W=128, N=2, K=1, segments=[[(1, 100), (2, 700), (3, 190), (4, 90)], [(1, 1100)]]),
    "halo of 512, rows in any order": make_case(
        B=1, T=1030, P=520, W=300, out_index=np.random.default_rng(0).integers(-1, 1030, (1, 520))
    ),
    "halo of 256, output window": make_case(B=1, T=600, W=257, out_window=513, segments=[[(1, 300), (2, 299)]]),
    "window too wide for a halo": make_case(B=1, T=1030, W=514, out_window=600, N=2, K=1),
}


@pytest.mark.parametrize("impl", ["tpu"])
@pytest.mark.parametrize("name", CASES)
def test_several_blocks(name, impl):
    case = CASES[name]
    found, truth = run(partial(dual_stream_attention, impl=impl, **case.mask), case, jnp.float32), case.truth()
    for key in NAMES:
        np.testing.assert_allclose(found[key], truth[key], rtol=2e-5, atol=2e-5, err_msg=key)
    assert_blind_rows_are_zero(found, case)


def test_fetches_of_a_simulated_tpu(monkeypatch):
    """The simulation fetches blocks into memory that starts as NaN, as a TPU does, ahead of the steps that use them."""
    monkeypatch.setattr(tpu, "unsupported", lambda *_: None)
    case = make_case(B=1, T=520, W=1, N=2, K=1, P=130, out_index=[[*range(5, 519, 4), -1]])
    _, q, k, v = case.arrays

    def values_and_grads(q, k, v):
        out, pull_back = jax.vjp(partial(cross_attention, out_index=jnp.asarray(case.out_index), impl="tpu"), q, k, v)
        return out, *pull_back(case.cotangents[1])

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")):
        found = jax.jit(values_and_grads)(q, k, v)
    visible = case.visible()[1]
    truth = reference.attention(q, k, v, visible), *reference.attention_grad(q, k, v, case.cotangents[1], visible)
    for x, y in zip(found, truth, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def _kernels(jaxpr):
    """Name, grid and products (shapes of both operands and of the result) of each pallas_call of a jaxpr."""

    def products(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                yield [x.aval.shape for x in (*eqn.invars, *eqn.outvars)]
            for inner in jaxprs_in_params(eqn.params):
                yield from products(inner)

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn.params["name"], eqn.params["grid_mapping"].grid, list(products(eqn.params["jaxpr"]))
        else:
            for inner in jaxprs_in_params(eqn.params):
                yield from _kernels(inner)


@pytest.mark.parametrize("impl", ["tpu"])
@pytest.mark.parametrize(("window", "most"), [(1, 256), (128, 2.05), (129, 2.05), (257, 1.55), (513, 1.35)])
def test_a_windowed_stream_computes_few_pairs_beyond_its_window(window, most, impl):
    """Products of the kernels over all their grid steps, in pairs of a query and a key, against the visible pairs."""
    length, heads, head_size = 8192, 2, 64
    queries, keys = (jax.ShapeDtypeStruct((1, length, n, head_size), jnp.bfloat16) for n in (heads, 1))

    def gradients(q, k, v):
        out, pull_back = jax.vjp(partial(sliding_window_attention, window=window, impl=impl), q, k, v)
        return pull_back(out)

    visible = heads * sum(min(row + 1, window) for row in range(length))
    kernels = {
        name: (grid, dots) for name, grid, dots in _kernels(jax.make_jaxpr(gradients)(queries, keys, keys).jaxpr)
    }
    for name, products in (
        ("window_attention", 2),
        ("window_attention_query_gradient", 3),
        ("attention_key_value_gradients", 4),
    ):
        grid, dots = kernels.pop(name)
        # Lengths m, n, k make an [m, k], a [k, n] and an [m, n]: the three sizes multiply to (m n k) ** 2.
        multiplications = sum(math.isqrt(math.prod(map(math.prod, shapes))) for shapes in dots)
        pairs = math.prod(grid) * multiplications / (products * head_size)
        assert visible <= pairs <= most * visible, (name, pairs / visible)
    assert not kernels


def test_halo():
    assert [tpu_window.halo_of(w, 8192) for w in (1, 129, 130, 257, 258, 513, 514, None)] == [
        128, 128, 256, 256, 512, 512, None, None,
    ]  # fmt: skip
    assert [tpu_window.halo_of(None, length) for length in (1, 129, 513, 514)] == [128, 128, 512, None]


def test_visits_are_the_blocks_that_hold_a_visible_pair():
    """Against the dense mask, for random ranges with blind rows and blind blocks."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        start = rng.integers(0, 30, (2, 24)).astype(np.int32)
        end = np.minimum(start + rng.integers(1, 12, start.shape), 32).astype(np.int32)
        blind = rng.random(start.shape) < rng.choice([0.1, 0.9])
        start[blind] = end[blind] = 0
        keys = np.arange(32)
        dense = (start[..., None] <= keys) & (keys < end[..., None])
        sees = np.asarray(dense.reshape(2, 6, 4, 4, 8).any(axis=(2, 4)))
        visits = tpu_tiles.key_blocks(jnp.asarray(start), jnp.asarray(end), 4, 8)
        for found, seen in ((visits, sees), (tpu_tiles.query_blocks(visits, 4), sees.swapaxes(1, 2))):
            first, stop = np.asarray(found.first)[..., None], np.asarray(found.end)[..., None]
            block = np.arange(seen.shape[2])
            np.testing.assert_array_equal(stop > first, seen.any(axis=2, keepdims=True))
            inside = (first <= block) & (block < stop)
            assert inside[seen].all()
            # The run starts and ends with a block of its own, unless a row in between hides a gap.
            if found is visits:
                edges = np.take_along_axis(seen, np.concatenate([first, np.maximum(stop - 1, 0)], -1), axis=2)
                assert edges[seen.any(axis=2)].all()


def test_a_schedule_visits_each_block_of_its_run_once_and_last():
    visits = tpu_tiles.Visits(jnp.asarray([[0, 2, 3, 0]]), jnp.asarray([[4, 3, 5, 0]]))
    steps = tpu_tiles.num_steps(visits)
    assert steps == 4
    schedule = tpu_tiles.schedule(visits, steps)
    fetched = [[int(schedule.visited(0, block, step)) for step in range(4)] for block in range(4)]
    assert fetched == [[0, 1, 2, 3], [2, 2, 2, 2], [3, 3, 3, 4], [0, 0, 0, 0]]
    used = [[bool(schedule.is_visit(0, block, step)) for step in range(4)] for block in range(4)]
    assert used == [[True] * 4, [False] * 3 + [True], [False] * 2 + [True] * 2, [False] * 4]
    nothing = tpu_tiles.Visits(jnp.zeros((1, 3), jnp.int32), jnp.zeros((1, 3), jnp.int32))
    assert tpu_tiles.num_steps() == tpu_tiles.num_steps(nothing) == 1
