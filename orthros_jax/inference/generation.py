"""Prompts to continuations: prefill once, then decode a batch of sequences until each has finished."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from orthros_jax.data.tokenizer import Tokenizer
from orthros_jax.errors import UserError
from orthros_jax.inference.cache import Cache, CacheFullError
from orthros_jax.inference.engine import Engine
from orthros_jax.inference.sampling import Sampling, sample, stack_settings
from orthros_jax.inference.text import TextStream

FinishReason = Literal["stop", "length", "capacity"]


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
      prompt: token ids, at least one.
      max_tokens: tokens to draw at most, at least one.
      sampling: how they are drawn.
      stop: strings that end the text; they are not part of it.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt.

    Attributes:
      text: without a stop string or what comes after it.
      tokens: all that were drawn, a stop token or the tokens of a stop string included.
      finish_reason: "stop" for a stop token or stop string, "length" for `max_tokens`, "capacity" for a full cache.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Timing:
    """Speed of a batch.

    Attributes:
      first_token: seconds until the first token of every sequence was there, compilation of the prefill included.
      decoding: seconds from the second token to the last, without the compilation of a step.
      tokens: tokens of all sequences in that time.
    """

    first_token: float
    decoding: float
    tokens: int


def encode_prompts(tokenizer: Tokenizer, bos: bool, texts: list[str]) -> list[list[int]]:
    """The token ids of texts, behind BOS where documents open with it; none for a text without tokens."""
    opening = [tokenizer.bos_id] if bos and tokenizer.bos_id is not None else []
    return [opening + ids.tolist() if len(ids) else [] for ids in tokenizer.encode_batch(texts)]


def check_prompt(tokens: int, capacity: int) -> None:
    """Refuses a prompt of so many tokens that a cache cannot hold.

    Raises:
      UserError: it is empty.
      CacheFullError: it is too long.
    """
    if not tokens:
        raise UserError("the prompt is empty; give at least one character")
    if tokens > capacity:
        raise CacheFullError(tokens, capacity)


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    *,
    stop_ids: Collection[int],
    on_text: Callable[[int, str], None] = lambda index, text: None,
) -> tuple[list[Completion], Timing]:
    """Continues up to `engine.batch_size` prompts together.

    A completion depends on its own request alone, up to the rounding of the engine.

    Args:
      engine: holds the model; its capacity bounds prompt and continuation of each sequence. The last token drawn needs
        no place in the cache.
      tokenizer: makes text of the tokens; ids beyond its vocabulary are never drawn.
      requests: one for each sequence.
      stop_ids: tokens that end a sequence.
      on_text: called with the index of a request and the next piece of its text as soon as that is certain.

    Raises:
      UserError: a prompt is empty, or the model's scores are not finite.
      CacheFullError: a prompt is longer than the cache.
    """

    def step(cache: Cache, drawn: jax.Array, steps: int) -> tuple[Cache, jax.Array]:
        if cache.longest == engine.capacity:
            cache = _with_room(cache, rows, steps)
        cache, logits = engine.decode(cache, drawn)
        return cache, sample(logits, settings, steps + 1, vocab_size=tokenizer.vocab_size)

    started = time.perf_counter()
    rows = [_Row(request, engine.capacity, tokenizer, stop_ids) for request in requests]
    idle = engine.batch_size - len(rows)
    settings = stack_settings([r.sampling for r in requests] + [Sampling(temperature=0)] * idle)
    cache, logits = engine.prefill(*_padded([r.prompt for r in requests] + [[0]] * idle))
    drawn = sample(logits, settings, 0, vocab_size=tokenizer.vocab_size)
    steps, times, tokens = 0, [started], 0  # times[n] is when n tokens of each sequence were there
    while True:
        # From the second token on, the next step is dispatched before the host reads the tokens of this one, so that
        # the device never waits. It is in vain where they turn out to be the last. The first token waits for nothing.
        ahead = None
        if steps and any(row.goes_on(steps) for row in rows):
            cache, ahead = step(cache, drawn, steps)
        for index, (row, token) in enumerate(zip(rows, np.asarray(drawn).tolist(), strict=False)):
            if row.finish_reason is None:
                tokens += steps > 1
                if text := row.take(token):
                    on_text(index, text)
        times.append(time.perf_counter())
        if all(row.finish_reason for row in rows):
            break
        if ahead is None:
            cache, ahead = step(cache, drawn, steps)
        drawn, steps = ahead, steps + 1
    timing = Timing(times[1] - started, times[-1] - times[min(2, steps + 1)], tokens)
    return [row.completion() for row in rows], timing


class _Row:
    """One sequence of the batch."""

    def __init__(self, request: Request, capacity: int, tokenizer: Tokenizer, stop_ids: Collection[int]):
        check_prompt(len(request.prompt), capacity)
        self.prompt_tokens = len(request.prompt)
        self.finish_reason: FinishReason | None = None
        self._limit = min(request.max_tokens, capacity - self.prompt_tokens + 1)
        self._at_limit: FinishReason = "length" if self._limit == request.max_tokens else "capacity"
        self._stream = TextStream(tokenizer.piece, request.stop)
        self._stop_ids = stop_ids
        self._tokens: list[int] = []
        self._text: list[str] = []

    def goes_on(self, steps: int) -> bool:
        """Whether it may need a token after the one that `steps` decoding steps gave, read already or not."""
        return self.finish_reason is None and steps + 1 < self._limit

    def take(self, token: int) -> str:
        """Takes the next token and returns the text that it makes certain."""
        if token < 0:
            raise UserError(
                "the model's scores are not finite: its weights are damaged, or too large for the compute or cache type"
            )
        self._tokens.append(token)
        text = "" if token in self._stop_ids else self._stream.push(token)
        if token in self._stop_ids or self._stream.stopped:
            self.finish_reason = "stop"
        elif len(self._tokens) == self._limit:
            self.finish_reason = self._at_limit
        if self.finish_reason:
            text += self._stream.finish()
            # What was held back may have been the end of a stop string.
            self.finish_reason = "stop" if self._stream.stopped else self.finish_reason
        self._text.append(text)
        return text

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion("".join(self._text), self._tokens, self.finish_reason)


def _with_room(cache: Cache, rows: Sequence[_Row], steps: int) -> Cache:
    """The cache without the tokens of finished sequences, which grow with the others and must not fill it for them."""
    goes_on = [row.goes_on(steps) for row in rows]
    longest = max(row.prompt_tokens + steps for row, kept in zip(rows, goes_on, strict=True) if kept)
    kept = np.array(goes_on + [False] * (cache.lengths.shape[0] - len(rows)))
    return replace(cache, lengths=jnp.where(kept, cache.lengths, 1), longest=longest)


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded prompts [B, T] and their lengths [B]."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths
