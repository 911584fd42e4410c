"""Attention over cut sequences against the same over whole ones: values and gradients."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthros_jax.config import MeshConfig
from orthros_jax.model import context
from orthros_jax.model.attention import Kind, Streams, attend
from orthros_jax.sharding import build_mesh

B, T, N, K, H = 2, 64, 4, 2, 8
# Documents of unequal length, some across several parts, and padding at the end of one row.
CUTS = {0: (3, 20, 21, 50, 64), 1: (40, 57)}


def _segments():
    segments = np.zeros((B, T), np.int32)
    for row, cuts in CUTS.items():
        for document, (start, end) in enumerate(zip((0, *cuts), cuts, strict=False)):
            segments[row, start:end] = document + 1
    return jnp.asarray(segments)


def _values_and_gradients(kind, mesh, arrays, segment_ids, out_index):
    queries, k, v, cotangents = arrays
    layout = SimpleNamespace(segment_ids=segment_ids, out_index=out_index)

    def run(queries, k, v):
        return attend(queries, k, v, layout, kind, "xla")  # pyright: ignore[reportArgumentType]

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def both(queries, k, v, cotangents):
        values, pull_back = jax.vjp(run, queries, k, v)
        return values, pull_back(cotangents)

    if mesh is None:
        return both(queries, k, v, cotangents)
    with jax.set_mesh(mesh):
        return both(queries, k, v, cotangents)


@pytest.mark.parametrize(
    ("mesh", "context_window", "output_window", "packed", "index"),
    [
        (MeshConfig(context=2, data=2, tensor=2), 5, None, True, False),
        (MeshConfig(context=4, fsdp=2), 5, None, True, False),
        (MeshConfig(context=8, data=1), 5, 9, True, False),
        (MeshConfig(context=8, data=1), 9, None, False, False),  # a halo of the whole part
        (MeshConfig(context=4, tensor=2), 30, None, True, False),  # a window that reaches beyond the neighbour
        (MeshConfig(context=4, data=2), 1, None, False, False),
        (MeshConfig(context=4, data=2), 6, None, True, True),
    ],
)
def test_cut_sequences_give_the_same(mesh, context_window, output_window, packed, index):
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    num_outputs = 16 if index else T
    out_index = None
    if index:
        rows = np.sort(np.stack([random.permutation(T)[:num_outputs] for _ in range(B)]), axis=1)
        rows[1, -3:] = -1
        out_index = jnp.asarray(rows, jnp.int32)
    queries = Streams(normal(B, T, N, H), normal(B, num_outputs, N, H))
    arrays = (queries, normal(B, T, K, H), normal(B, T, K, H), Streams(*(normal(*q.shape) for q in queries)))
    kind = Kind(True, context_window, output_window)
    arguments = (arrays, _segments() if packed else None, out_index)
    expected = _values_and_gradients(kind, None, *arguments)
    cut = _values_and_gradients(kind, build_mesh(mesh), *arguments)
    # Float32 sums in another order; the gathered keys' gradients add up to c parts.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), cut, expected)


@pytest.mark.parametrize("parts", range(1, 9))
def test_every_device_computes_two_chunks_of_equal_work(parts):
    for route in context._routes(parts):
        sources, targets = zip(*route, strict=True)
        assert sorted(sources) == sorted(targets) == list(range(parts))
    chunks = {i: [c for c in range(2 * parts) if context._owner(c, parts) == i] for i in range(parts)}
    assert all(sum(owned) == 2 * parts - 1 for owned in chunks.values())
