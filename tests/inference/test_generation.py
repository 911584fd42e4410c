"""The loop of prefill and decoding on a scripted engine: who stops when, and what is drawn for whom."""

import numpy as np
import pytest
from scripted import VOCAB_SIZE, ScriptedEngine, continuing

from orthros_jax.data.tokenizer import ByteTokenizer
from orthros_jax.errors import UserError
from orthros_jax.inference.generation import Request, generate
from orthros_jax.inference.sampling import Sampling

pytestmark = pytest.mark.usefixtures("compile_cache")

BYTES = ByteTokenizer()
EOS = 257
GREEDY = Sampling(temperature=0)


def request(prompt: str, max_tokens: int = 20, stop: tuple[str, ...] = (), sampling: Sampling = GREEDY) -> Request:
    return Request(list(prompt.encode()), max_tokens, sampling, stop)


def run(engine: ScriptedEngine, *requests: Request, stop_ids=(EOS,)):
    """Completions, and for each request the pieces of its stream."""
    streams: list[list[str]] = [[] for _ in requests]
    completions, timing = generate(
        engine,  # pyright: ignore[reportArgumentType]
        BYTES,
        requests,
        stop_ids=stop_ids,
        on_text=lambda index, text: streams[index].append(text),
    )
    assert timing.first_token > 0
    assert (timing.decoding > 0) == (timing.tokens > 0)
    assert timing.tokens == sum(max(len(c.tokens) - 2, 0) for c in completions)
    assert [completion.text for completion in completions] == ["".join(stream) for stream in streams]
    assert not any("" in stream for stream in streams)
    return completions, streams


def test_rows_finish_each_for_its_own_reason():
    """A stop token, a stop string, the limit of tokens; finished rows say no more."""
    texts = {"ab": [*b"one", EOS, *b"never"], "c": "two.\n\nnever", "def": "three and more"}
    engine = ScriptedEngine(continuing(texts))
    completions, streams = run(
        engine, request("ab"), request("c", stop=("\n\n", "zzz")), request("def", max_tokens=5, stop=("eX",))
    )
    assert [(c.text, c.finish_reason, len(c.tokens)) for c in completions] == [
        ("one", "stop", 4),
        ("two.", "stop", 6),
        ("three", "length", 5),
    ]
    assert completions[0].tokens[-1] == EOS
    assert streams == [["o", "n", "e"], ["t", "w", "o", "."], ["t", "h", "r", "ee"]]
    # The last token drawn is number 6, after 5 steps; no step more than the one that was already on its way.
    assert engine.steps == 6


def test_several_stop_tokens():
    engine = ScriptedEngine(continuing({"a": [5, 7, 9], "b": [5, 6, 3, 9]}))
    (a, b), _ = run(engine, request("a"), request("b"), stop_ids={3, 7})
    assert (a.tokens, b.tokens) == ([5, 7], [5, 6, 3])


def test_one_token_needs_no_step():
    engine = ScriptedEngine(continuing({"a": "xyz"}))
    ((completion,), _) = run(engine, request("a", max_tokens=1))
    assert (completion.text, completion.finish_reason, engine.steps) == ("x", "length", 0)


def test_a_character_in_progress_at_the_limit():
    engine = ScriptedEngine(continuing({"a": "é🦊"}))
    (completion,), (stream,) = run(engine, request("a", max_tokens=4))
    assert (completion.text, stream) == ("é\ufffd", ["é", "\ufffd"])


def test_text_held_back_at_a_stop_token_is_not_lost():
    engine = ScriptedEngine(continuing({"a": [*b"x st", EOS]}))
    (completion,), (stream,) = run(engine, request("a", stop=("stop",)))
    assert (completion.text, completion.finish_reason) == ("x st", "stop")
    assert stream == ["x", " ", "st"]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "drawn", "reason"),
    [
        ("a" * 12, 10, 5, "capacity"),
        ("a" * 12, 5, 5, "length"),
        ("a" * 16, 1, 1, "length"),
        ("a" * 16, 9, 1, "capacity"),
    ],
)
def test_a_full_cache_ends_a_sequence(prompt, max_tokens, drawn, reason):
    """A cache of 16 tokens; the last token drawn needs no place in it."""
    engine = ScriptedEngine(continuing({prompt: "x" * 20}), capacity=16)
    (completion,), _ = run(engine, request(prompt, max_tokens))
    assert (completion.text, completion.finish_reason) == ("x" * drawn, reason)
    assert engine.steps == drawn - 1


def test_a_full_cache_of_one_sequence_does_not_end_the_others():
    texts = {"a" * 15: "x" * 20, "b": "y" * 30, "c" * 9: [*b"zz", EOS]}
    engine = ScriptedEngine(continuing(texts), capacity=16)
    completions, _ = run(engine, *(request(prompt, 100) for prompt in texts))
    assert [(c.text, c.finish_reason) for c in completions] == [
        ("xx", "capacity"),
        ("y" * 16, "capacity"),
        ("zz", "stop"),
    ]
    assert engine.steps == 15


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, "the prompt is empty; give at least one character"),
        (
            17,
            "a sequence of 17 tokens does not fit the cache, whose capacity is 16 tokens (prompt and generated "
            "together); make the cache larger, shorten the prompt or generate less",
        ),
    ],
)
def test_prompts_that_do_not_fit(length, message):
    engine = ScriptedEngine(continuing({}), capacity=16)
    with pytest.raises(UserError) as error:
        run(engine, request("fits"), request("a" * length))
    assert str(error.value) == message


def hashed(ids: list[int]) -> np.ndarray:
    """Scores that depend on every id so far."""
    return np.random.default_rng(ids).normal(size=VOCAB_SIZE)


def test_a_completion_does_not_depend_on_its_batch():
    requests = [
        request("same", 8, sampling=Sampling(seed=1)),
        request("same", 8, sampling=Sampling(seed=2)),
        request("other prompt", 12, sampling=Sampling(temperature=3.0, top_k=50, seed=1)),
        request("g", 9),
        request("same", 30, sampling=Sampling(seed=1)),
    ]
    alone = [run(ScriptedEngine(hashed, batch_size=1), r, stop_ids=())[0][0] for r in requests]
    assert all(len(c.tokens) == r.max_tokens for c, r in zip(alone, requests, strict=True))
    assert max(max(c.tokens) for c in alone) < BYTES.vocab_size
    together, _ = run(ScriptedEngine(hashed), *requests, stop_ids=())
    assert together == alone
    reversed_order, _ = run(ScriptedEngine(hashed), *reversed(requests), stop_ids=())
    assert reversed_order[::-1] == alone
    assert alone[0].tokens != alone[1].tokens
    assert alone[4].tokens[:8] == alone[0].tokens


def test_scores_that_are_not_finite():
    def scores(ids):
        return np.full(VOCAB_SIZE, np.nan) if len(ids) == 4 else np.zeros(VOCAB_SIZE)

    with pytest.raises(UserError) as error:
        run(ScriptedEngine(scores), request("ab"), request("c"))
    assert str(error.value) == (
        "the model's scores are not finite: its weights are damaged, or too large for the compute or cache type"
    )


def test_idle_rows_may_hold_anything():
    """Scores of a row without a request are not looked at."""

    def scores(ids):
        return np.full(VOCAB_SIZE, np.nan) if ids[0] == 0 else np.zeros(VOCAB_SIZE)

    (completion,), _ = run(ScriptedEngine(scores), request("a", max_tokens=3))
    assert completion.tokens == [0, 0, 0]
