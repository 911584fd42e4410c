"""Learning rate as a function of the step, in closed form."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from orthros_jax.config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """The schedule of a run of `steps` optimizer steps, or of `config.schedule_steps` where that is set.

    Step s counts completed steps. Warm-up is linear, peak * (s + 1) / warmup_steps, so that step 0 moves
    already. Then the rate falls from the peak to final_ratio * peak, which it reaches at s = schedule length
    and holds from there: `cosine` and `linear` fall from the end of the warm-up on, `wsd` holds the peak and
    falls linearly during the last decay_steps (arXiv 2404.06395), `constant` never falls. A warm-up longer
    than the schedule runs in full.

    Returns:
      A function of the step, jit-able, float32.
    """
    length = steps if config.schedule_steps is None else config.schedule_steps
    warmup, peak = config.warmup_steps, config.learning_rate
    fall_start = max(warmup, length - config.decay_steps) if config.schedule == "wsd" else warmup
    fall_steps = max(length - fall_start, 1)

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        fallen = jnp.clip((step - fall_start) / fall_steps, 0, 1)
        if config.schedule == "cosine":
            height = (1 + jnp.cos(math.pi * fallen)) / 2
        elif config.schedule == "constant":
            height = jnp.ones_like(fallen)
        else:
            height = 1 - fallen
        rate = peak * (config.final_ratio + (1 - config.final_ratio) * height)
        return jnp.where(step < warmup, peak * (step + 1) / max(warmup, 1), rate)

    return schedule
