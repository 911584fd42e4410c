"""Loss on the held-out split."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np

from orthros_jax.loss import LossSums


class HeldOut(NamedTuple):
    """A token-weighted mean over the whole split: loss in nats, and the predicted tokens that it is over."""

    loss: float
    tokens: int


def evaluate(
    eval_step: Callable[..., LossSums], params, batches: Iterable, should_stop: Callable[[int], bool]
) -> HeldOut | None:
    """Mean of the loss over every predicted token of all batches.

    Args:
      eval_step: (params, batch) -> LossSums on the device.
      batches: device batches; padding rows have weight 0.
      should_stop: asked before each batch, with its number.

    Returns:
      None if it was told to stop or the split predicts nothing.
    """
    sums = []
    for number, batch in enumerate(batches):
        if should_stop(number):
            return None
        sums.append(eval_step(params, batch))
        # The device is kept one batch ahead and no more, so that a stop is obeyed within a batch.
        jax.block_until_ready(sums[-2:-1])
    if not sums:
        return None
    # Added up in float64: float32 sums of a large split would lose whole batches.
    entropy = np.sum(jax.device_get([s.cross_entropy for s in sums]), dtype=np.float64)
    weight = np.sum(jax.device_get([s.weight for s in sums]), dtype=np.float64)
    return HeldOut(float(entropy / weight), int(weight)) if weight else None
