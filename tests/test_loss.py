"""Chunked cross-entropy against float64, and that no device ever holds a batch of logits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthros_jax import loss
from orthros_jax.config import MeshConfig
from orthros_jax.loss import cross_entropy
from orthros_jax.sharding import build_mesh
from orthros_jax.streams import Targets

B, D, V = 8, 12, 40


def _case(rows, seed=0, batch=B):
    random = np.random.default_rng(seed)
    hidden = random.normal(size=(batch, rows, D)).astype(np.float32)
    head = random.normal(size=(D, V)).astype(np.float32)
    labels = random.integers(0, V, (batch, rows)).astype(np.int32)
    weights = (random.random((batch, rows)) * (random.random((batch, rows)) < 0.7)).astype(np.float32)
    return hidden, head, labels, weights


def _targets(labels, weights):
    return Targets(jnp.asarray(labels), jnp.asarray(weights))


def _exact(hidden, head, labels, weights, z_loss):
    """Sums and gradients of the objective by rows and head, in float64."""
    hidden, head, weights = (np.asarray(x, np.float64) for x in (hidden, head, weights))
    logits = hidden @ head
    peak = logits.max(axis=-1, keepdims=True)
    normaliser = np.log(np.exp(logits - peak).sum(axis=-1)) + peak[..., 0]
    nll = normaliser - np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    probability = np.exp(logits - normaliser[..., None])
    d_logits = (1 + 2 * z_loss * normaliser)[..., None] * probability - np.eye(V)[labels]
    d_logits *= weights[..., None]
    sums = (weights * (nll + z_loss * normaliser**2)).sum(), (weights * nll).sum(), weights.sum()
    return sums, d_logits @ head.T, np.einsum("bpd,bpv->dv", hidden, d_logits)


def _with_gradients(hidden, head, labels, weights, z_loss, scale=1.0):
    def objective(hidden, head):
        sums = cross_entropy(hidden, head, _targets(labels, weights), z_loss=z_loss)
        return scale * sums.objective, sums

    (_, sums), gradients = jax.value_and_grad(objective, (0, 1), has_aux=True)(hidden, head)
    return sums, gradients


_jitted = jax.jit(_with_gradients, static_argnames=("z_loss", "scale"))


# One row, fewer rows than chunks, a number that chunks do not divide, one that they do.
@pytest.mark.parametrize("rows", [1, 5, 37, 64])
@pytest.mark.parametrize("z_loss", [0.0, 0.02])
def test_sums_and_gradients(rows, z_loss):
    case = _case(rows)
    expected, d_hidden, d_head = _exact(*case, z_loss)
    sums, gradients = _jitted(*case, z_loss=z_loss, scale=3.0)
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    np.testing.assert_allclose(gradients[0], 3 * d_hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients[1], 3 * d_head, rtol=1e-4, atol=1e-4)
    hidden, head, labels, weights = case
    without = cross_entropy(jnp.asarray(hidden), jnp.asarray(head), _targets(labels, weights), z_loss=z_loss)
    np.testing.assert_allclose(without, sums, rtol=1e-6)


def test_more_rows_than_one_chunk_holds(monkeypatch):
    monkeypatch.setattr(loss, "_CHUNK_ROWS", 16)
    case = _case(29)
    expected, d_hidden, d_head = _exact(*case, 0.01)
    sums, gradients = _jitted(*case, z_loss=0.01)
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    np.testing.assert_allclose(gradients[0], d_hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients[1], d_head, rtol=1e-4, atol=1e-4)


def test_rows_of_weight_zero_count_nowhere():
    hidden, head, labels, weights = _case(9)
    weights[:, 4:] = 0
    sums, (d_hidden, d_head) = _with_gradients(hidden, head, labels, weights, z_loss=0.1)
    others = hidden.copy()
    others[:, 4:] = 100.0
    other_labels = np.where(weights > 0, labels, (labels + 1) % V)
    other_sums, (_, other_d_head) = _with_gradients(others, head, other_labels, weights, z_loss=0.1)
    np.testing.assert_array_equal(d_hidden[:, 4:], 0)
    np.testing.assert_array_equal(sums, other_sums)
    np.testing.assert_array_equal(d_head, other_d_head)
    nothing, gradients = _with_gradients(hidden, head, labels, np.zeros_like(weights), z_loss=0.1)
    np.testing.assert_array_equal(nothing, [0, 0, 0])
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), gradients)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    _, head, labels, weights = _case(6)
    sums = cross_entropy(jnp.zeros((B, 6, D)), jnp.asarray(head), _targets(labels, weights), z_loss=0.5)
    np.testing.assert_allclose(sums.cross_entropy / sums.weight, math.log(V), rtol=1e-6)
    np.testing.assert_allclose(sums.objective / sums.weight, math.log(V) + 0.5 * math.log(V) ** 2, rtol=1e-6)


def test_large_logits_stay_finite():
    hidden, head, labels, weights = _case(6)
    expected, d_hidden, _ = _exact(hidden * 1000, head, labels, weights, 0.0)
    sums, gradients = _with_gradients(hidden * 1000, head, labels, weights, z_loss=0.0)
    np.testing.assert_allclose(sums, expected, rtol=1e-4)
    np.testing.assert_allclose(gradients[0], d_hidden, rtol=1e-3, atol=1e-3)


def test_products_in_bfloat16_keep_types_and_sum_in_float32():
    hidden, head, labels, weights = _case(37)
    narrow = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16).astype(jnp.float32)
    expected, d_hidden, d_head = _exact(*narrow, labels, weights, 0.0)
    sums, gradients = _jitted(*narrow, labels, weights, z_loss=0.0)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    # Gradients of the logits are rounded to 8 bits once, those of the rows once more.
    for actual, exact in ((gradients[0], d_hidden), (gradients[1], d_head)):
        error = np.asarray(actual, np.float64) - exact
        assert np.sqrt((error**2).mean()) < 2**-8 * np.sqrt((exact**2).mean())


@pytest.mark.parametrize("axes", [(8, 1, 1), (2, 2, 2), (1, 1, 8), (2, 1, 2, 2)])
def test_every_mesh_gives_the_same_sums_and_gradients(axes):
    mesh = build_mesh(MeshConfig(*axes))
    case = _case(36)
    expected, d_hidden, d_head = _exact(*case, 0.02)
    with jax.set_mesh(mesh):
        sums, gradients = _jitted(*case, z_loss=0.02, scale=3.0)
        without = jax.jit(
            lambda hidden, head, labels, weights: cross_entropy(hidden, head, _targets(labels, weights), z_loss=0.02)
        )(*case)
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    np.testing.assert_allclose(without, expected, rtol=1e-5)
    np.testing.assert_allclose(gradients[0], 3 * d_hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients[1], 3 * d_head, rtol=1e-4, atol=1e-4)
