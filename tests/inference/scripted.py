"""An engine that follows a script, to test what is built on engines without a model."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from orthros_jax.inference.cache import Cache, CacheFullError

# One size for most tests: sampling compiles for each. The model has more entries than the tokenizer.
BATCH_SIZE, VOCAB_SIZE = 7, 300


class ScriptedEngine:
    """Scores of a sequence's next token are `scores(ids so far)`, [V]; it counts steps and guards the capacity."""

    def __init__(self, scores: Callable[[list[int]], np.ndarray], batch_size: int = BATCH_SIZE, capacity: int = 64):
        self.batch_size, self.capacity, self.steps = batch_size, capacity, 0
        self._scores = scores
        self._sequences: list[list[int]] = []

    def prefill(self, tokens: np.ndarray, lengths: np.ndarray) -> tuple[Cache, Any]:
        assert tokens.shape[0] == len(lengths) == self.batch_size
        assert 1 <= lengths.min() <= lengths.max() <= tokens.shape[1]
        if lengths.max() > self.capacity:
            raise CacheFullError(int(lengths.max()), self.capacity)
        self._sequences = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
        return Cache((), jnp.asarray(lengths), int(lengths.max())), self._logits()

    def decode(self, cache: Cache, tokens: Any) -> tuple[Cache, Any]:
        if cache.longest == self.capacity:
            raise CacheFullError(cache.longest + 1, self.capacity)
        assert cache.lengths.max() <= cache.longest
        self.steps += 1
        for sequence, token in zip(self._sequences, np.asarray(tokens).tolist(), strict=True):
            sequence.append(token)
        return Cache((), cache.lengths + 1, cache.longest + 1), self._logits()

    def _logits(self):
        return jnp.asarray(np.array([self._scores(sequence) for sequence in self._sequences], np.float32))


def continuing(
    continuations: dict[str, str | list[int]], vocab_size: int = VOCAB_SIZE
) -> Callable[[list[int]], np.ndarray]:
    """Scores of a byte model that continues each prompt as told, and anything else with zeros."""
    known = {
        tuple(prompt.encode()): list(text.encode()) if isinstance(text, str) else text
        for prompt, text in continuations.items()
    }

    def scores(ids: list[int]) -> np.ndarray:
        result = np.zeros(vocab_size)
        for prompt, continuation in known.items():
            done = len(ids) - len(prompt)
            if tuple(ids[: len(prompt)]) == prompt and 0 <= done < len(continuation):
                result[continuation[done]] = 100
        return result

    return scores
