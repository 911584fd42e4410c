"""The next token of each sequence of a batch: greedy, or drawn after temperature, top-k, top-p and min-p.

Letters: B batch, V vocabulary. What a row draws depends on its own scores, settings and key, never on its neighbours.
"""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthros_jax.errors import UserError

SEED_LIMIT = 2**32
# Probabilities that fall short of top_p by no more than this share of it count as top_p: the error of float32 sums.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How one sequence is sampled.

    The filters apply one after the other to softmax(logits / temperature): the `top_k` likeliest tokens; of those,
    renormalised, the fewest likeliest whose probabilities add up to `top_p` at least; of those, the ones with at least
    `min_p` times the probability of the likeliest. The likeliest always stays. Of equal scores the lower id is the
    likelier.

    Attributes:
      temperature: divisor of the logits; 0 takes the likeliest token and ignores the rest.
      top_k: number of tokens to keep, 0 keeps all.
      top_p: mass to keep (arXiv 1904.09751), 1 keeps all.
      min_p: smallest share of the highest probability to keep (arXiv 2407.01082), 0 keeps all.
      seed: the same seed, scores and settings draw the same tokens.

    Raises:
      UserError: a value is out of range.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self):
        for name, fits, rule in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or a positive number"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (off) or a positive whole number"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 (off) to 1"),
            ("seed", 0 <= self.seed < SEED_LIMIT, f"a whole number from 0 to {SEED_LIMIT - 1}"),
        ):
            if not fits:
                raise UserError(f"{name} must be {rule}, got {getattr(self, name)}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingArrays:
    """The settings of a batch: temperature, top_p, min_p [B] float32, top_k [B] int32, keys [B] random keys."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    keys: Any


def stack_settings(settings: list[Sampling]) -> SamplingArrays:
    """The settings of B sequences as arrays."""
    columns = {field.name: [getattr(s, field.name) for s in settings] for field in fields(Sampling)}
    keys = jax.vmap(jax.random.key)(np.asarray(columns.pop("seed"), np.uint32))
    types = {"top_k": np.int32}
    return SamplingArrays(**{k: jnp.asarray(v, types.get(k, np.float32)) for k, v in columns.items()}, keys=keys)


@partial(jax.jit, static_argnames="vocab_size")
def sample(
    logits: jax.Array, settings: SamplingArrays, number: jax.Array | int, *, vocab_size: int | None = None
) -> jax.Array:
    """Draws the next token of each row.

    Args:
      logits: [B, V], any float type.
      settings: of the B rows.
      number: how many tokens were drawn before, [] or [B] int32: with the key it decides the random numbers.
      vocab_size: ids below this can be drawn, V if None.

    Returns:
      [B] int32; -1 in a row whose scores are NaN or infinite.
    """
    scores = logits[:, :vocab_size].astype(jnp.float32)
    highest = scores.max(axis=1)
    greedy = jnp.argmax(scores, axis=1).astype(jnp.int32)
    numbers = jnp.broadcast_to(jnp.asarray(number, jnp.int32), greedy.shape)
    is_drawn = settings.temperature > 0

    def draw() -> jax.Array:
        drawn = jax.vmap(_draw)(scores, settings, numbers)
        return jnp.where(is_drawn, drawn, greedy)

    # Sorting a large vocabulary takes time that greedy decoding need not spend.
    tokens = jax.lax.cond(is_drawn.any(), draw, lambda: greedy)
    return jnp.where(jnp.isfinite(highest), tokens, -1)


def _draw(scores: jax.Array, settings: SamplingArrays, number: jax.Array) -> jax.Array:
    """One row: scores [V] to a token []. All filters keep a prefix of the tokens in order of their scores."""
    # Relative to the highest, so that no temperature is too small: the others become -inf at worst.
    scaled = (scores - scores.max()) / jnp.maximum(settings.temperature, jnp.finfo(jnp.float32).tiny)
    order = jnp.argsort(-scaled, stable=True)
    scaled = scaled[order]
    rank = jnp.arange(scaled.size)
    kept = rank < jnp.where(settings.top_k > 0, settings.top_k, scaled.size)
    probabilities = jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf))
    # The token that crosses the threshold stays. Rounding must not cut the tail off where nothing is to be cut.
    likelier = jnp.cumsum(probabilities).at[-1].set(0)
    likelier = jnp.roll(likelier, 1)
    kept &= (likelier < settings.top_p * (1 - _ROUNDING)) | (settings.top_p >= 1) | (rank == 0)
    kept &= jnp.exp(scaled) >= settings.min_p
    # The noise goes with the token, not with its rank: a small error of the scores rarely changes what is drawn.
    noise = jax.random.gumbel(jax.random.fold_in(settings.keys, number), scaled.shape)[order]
    return order[jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf))].astype(jnp.int32)
