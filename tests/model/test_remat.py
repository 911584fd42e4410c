"""Rematerialisation changes what is kept, not what is computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from orthros_jax import streams
from orthros_jax.loss import cross_entropy

from .small import fast_jit, graph_of, random_params, small_config

pytestmark = pytest.mark.usefixtures("compile_cache")

T = 64


@functools.cache
def _loss_and_gradient(remat):
    """Loss, gradient and operations, counted by the compiler, of a model whose cost is attention."""
    config = small_config(remat=remat, num_layers=2, model_dim=16, num_heads=8, num_kv_heads=8, head_dim=64, window=16)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, T + 1))
    layout, targets = streams.pretraining(jnp.asarray(tokens, jnp.int32))

    def loss(params):
        model = nnx.merge(graph_of(config), params)
        return cross_entropy(model(layout), model.head_kernel(), targets).objective

    params = random_params(config)
    compiled = fast_jit(jax.value_and_grad(loss)).lower(params).compile()
    value, gradient = compiled(params)
    cost = compiled.cost_analysis()
    assert cost is not None
    return value, gradient, cost["flops"]


@pytest.mark.parametrize("remat", ["save_dots", "save_attention", "full"])
def test_every_policy_gives_the_same_loss_and_gradient(remat):
    value, gradient, _ = _loss_and_gradient(remat)
    expected, expected_gradient, _ = _loss_and_gradient("none")
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradient, expected_gradient)


def test_each_policy_recomputes_what_it_does_not_keep():
    """By operations, with attention of one block: three streams in two layers, two products each.

    The backward pass needs the scores in any case. Without rematerialisation the compiler takes them from the
    forward pass; with `full` it shares them with the attention that runs again; so each costs half of it.
    """
    none, dots, attention, full = (
        _loss_and_gradient(remat)[2] for remat in ("none", "save_dots", "save_attention", "full")
    )
    half_attention = 3 * 2 * 8 * 64 * T * T
    projections = 10 * 2 * T * 16 * 8 * 64
    assert dots - none == pytest.approx(half_attention, rel=0.25)
    # Less than all ten: `save_dots` makes element-wise work again twice, for itself and for what keeps its inputs.
    assert 0.5 * projections < attention - dots < 1.1 * projections
    assert full - attention == pytest.approx(half_attention, rel=0.25)
