"""AdamW with decay groups, and the average of the parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from orthros_jax.config import OptimizerConfig

# Stacked layers give every parameter a leading axis, so that the rank does not tell a matrix from a vector.
_NOT_DECAYED = {"scale", "gamma", "beta"}


def is_decayed(path: KeyPath) -> bool:
    """Whether weight decay applies: to matrices, never to norm scales and the query's gamma and beta."""
    return jax.tree_util.keystr(path[-1:], simple=True) not in _NOT_DECAYED


def make_optimizer(
    config: OptimizerConfig, schedule: Callable[[jax.typing.ArrayLike], jax.Array], params: Any
) -> optax.GradientTransformation:
    """Global-norm clipping and AdamW (arXiv 1711.05101): p -= rate * (mhat / (sqrt(vhat) + eps) + decay * p).

    Gradients, both moments and the update are float32 whatever the type of the parameters: optax would let
    the second moment inherit bfloat16, whose 8 bits lose additions of (1 - beta2) * g^2.

    Args:
      config: rates, decay and clipping; clip_norm 0 leaves gradients as they are.
      schedule: learning rate by completed step.
      params: the parameters or their ShapeDtypeStructs; only their names matter.
    """
    decayed = jax.tree.map_with_path(lambda path, _: is_decayed(path), params)
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity()
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    return optax.chain(
        optax.stateless(lambda updates, _: _to_float32(updates)),
        clip,
        optax.GradientTransformation(lambda params: adam.init(_to_float32(params)), adam.update),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(schedule),
    )


def update_ema(ema: Any, params: Any, decay: float) -> Any:
    """decay * ema + (1 - decay) * params, leaf by leaf, computed in float32 and kept in the type of `ema`."""

    def average(old: jax.Array, new: jax.Array) -> jax.Array:
        mean = decay * old.astype(jnp.float32) + (1 - decay) * new.astype(jnp.float32)
        return mean.astype(old.dtype)

    return jax.tree.map(average, ema, params)


def _to_float32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
