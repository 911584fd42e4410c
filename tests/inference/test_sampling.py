"""Sampling against a float64 reference that computes the distribution which must be drawn from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthros_jax.errors import UserError
from orthros_jax.inference.sampling import Sampling, sample, stack_settings

pytestmark = pytest.mark.usefixtures("compile_cache")

V = 23
DRAWS = 4000
# Filters alone and together; the last has a k beyond the vocabulary and a p that keeps a single token.
SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0),
    Sampling(temperature=1.0, top_k=4),
    Sampling(temperature=1.0, top_p=0.7),
    Sampling(temperature=1.0, min_p=0.2),
    Sampling(temperature=1.7, top_k=9, top_p=0.8, min_p=0.1),
    Sampling(temperature=1.0, top_k=2 * V, top_p=1e-8),
]


def distribution(logits, settings: Sampling) -> np.ndarray:
    """[V] probabilities that are sampled from, in float64."""
    logits = np.asarray(logits, np.float64)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if settings.temperature == 0:
        order, weights = order[:1], {order[0]: 1.0}
    else:
        weights = {i: np.exp((logits[i] - logits[order[0]]) / settings.temperature) for i in order}
    if settings.top_k:
        order = order[: settings.top_k]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if mass >= settings.top_p * (1 - 1e-6) and kept and settings.top_p < 1:
            break
        kept.append(i)
        mass += weights[i] / total
    kept = [i for i in kept if weights[i] >= settings.min_p * weights[order[0]]]
    probabilities = np.zeros(len(logits))
    probabilities[kept] = [weights[i] for i in kept]
    return probabilities / probabilities.sum()


def draw(logits, settings: Sampling | list[Sampling], numbers: Any = 0) -> np.ndarray:
    """One token for each row; everything runs as one compiled shape, with idle rows and impossible tokens."""
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    settings = settings if isinstance(settings, list) else [settings]
    rows = max(len(logits), len(settings), np.size(numbers))
    padded = np.full((DRAWS, V), -np.inf, np.float32)
    padded[:, 0] = 0
    padded[:rows] = -np.inf
    padded[:rows, : logits.shape[1]] = logits
    every = np.zeros(DRAWS, np.int32)
    every[:rows] = numbers
    settings = settings * rows if len(settings) == 1 else settings
    tokens = sample(padded, stack_settings(settings + [Sampling()] * (DRAWS - rows)), every)
    return np.asarray(tokens)[:rows]


def drawn(logits, settings: Sampling) -> np.ndarray:
    """Frequencies over many numbers of one seed."""
    return np.bincount(draw(logits, settings, np.arange(DRAWS)), minlength=len(logits)) / DRAWS


def support(logits, settings: Sampling) -> set[int]:
    return set(np.flatnonzero(drawn(logits, settings)).tolist())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_the_reference(settings):
    logits = np.random.default_rng(0).normal(size=V).astype(np.float32) * 1.5
    expected = distribution(logits, settings)
    # Five standard deviations of a frequency; nothing outside the support is ever drawn.
    deviation = np.sqrt(expected * (1 - expected) / DRAWS)
    found = drawn(logits, settings)
    np.testing.assert_array_less(np.abs(found - expected), 5 * deviation + 1e-9)
    assert ((found > 0) <= (expected > 0)).all()


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.8, {0, 1}), (0.6, {0}), (0.61, {0, 1}), (0.9, {0, 1}), (1.0, {0, 1, 2}), (1e-8, {0})]
)
def test_top_p_keeps_the_token_that_crosses_the_threshold(top_p, kept):
    assert support(np.log([0.6, 0.3, 0.1]), Sampling(temperature=1.0, top_p=top_p)) == kept


@pytest.mark.parametrize("top_p", [1e-30, 1e-45, 5e-324])
def test_the_smallest_top_p_keeps_the_likeliest(top_p):
    assert support([0.0, 3.0, 1.0], Sampling(top_p=top_p)) == {1}


@pytest.mark.parametrize("settings", [Sampling(temperature=0), Sampling(top_k=1)], ids=str)
def test_of_equal_scores_the_lower_id_is_the_likelier(settings):
    assert support([1.0, 4.0, 4.0, 0.0], settings) == {1}
    assert support([2.0, 2.0, 2.0, 2.0], settings) == {0}


def test_top_k_cuts_through_ties_at_exactly_k():
    assert support([1.0, 1.0, 1.0, 1.0, 0.0], Sampling(temperature=1.0, top_k=2)) == {0, 1}


def test_min_p_of_1_keeps_what_is_as_likely_as_the_likeliest():
    assert support([1.0, 4.0, 4.0, 3.999], Sampling(min_p=1.0)) == {1, 2}


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-40])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_no_temperature_is_too_small(temperature, scale):
    assert support(np.array([0.1, 0.7, 0.2, 0.3]) * scale, Sampling(temperature=temperature)) == {1}


def test_all_of_a_large_vocabulary_stays_with_top_p_1():
    """The float32 sum of these probabilities passes 1 before its end; a seed and a number each draw their own."""
    logits = np.zeros((64, 100_000), np.float32)
    logits[:, -1] = 12.0
    logits[:, :-1] -= np.linspace(0, 1e-3, logits.shape[1] - 1, dtype=np.float32)
    settings = [Sampling(temperature=1.0, seed=seed) for seed in (0, 1, 2**32 - 1, 7) for _ in range(16)]
    tokens = np.asarray(sample(logits, stack_settings(settings), np.tile(np.arange(16, dtype=np.int32), 4)))
    tail = tokens[tokens < logits.shape[1] - 1]
    assert len(tail) > 16
    assert tail.max() > logits.shape[1] * 0.8
    assert len(set(tail.tolist())) == len(tail)


def test_a_row_does_not_depend_on_its_neighbours():
    random = np.random.default_rng(1)
    settings = [Sampling(**{**vars(s), "seed": n}) for n, s in enumerate(SETTINGS)] + [Sampling(temperature=0)]
    logits = random.normal(size=(len(settings), V)).astype(np.float32)
    numbers = random.integers(0, 1000, size=(30, len(settings))).astype(np.int32)
    together = np.stack([draw(logits, settings, row) for row in numbers])
    order = random.permutation(len(settings))
    shuffled = [draw(logits[order], [settings[r] for r in order], row[order]) for row in numbers]
    np.testing.assert_array_equal(np.stack(shuffled), together[:, order])
    for r, own in enumerate(settings):
        alone = [sample(logits[r : r + 1], stack_settings([own]), row[r : r + 1])[0] for row in numbers]
        np.testing.assert_array_equal(alone, together[:, r])
    assert (together[:, -1] == logits[-1].argmax()).all()


def test_seed_and_number_decide_what_is_drawn():
    """A number may also be one for all rows, and traced."""
    logits = np.random.default_rng(2).normal(size=(1, V)).astype(np.float32)
    a, b = (draw(logits, Sampling(temperature=2.0, seed=seed), np.arange(100)) for seed in (5, 6))
    assert (a != b).mean() > 0.5
    assert len(set(a.tolist())) > V // 2
    np.testing.assert_array_equal(a, draw(logits, Sampling(temperature=2.0, seed=5), np.arange(100)))
    settings = stack_settings([Sampling(temperature=2.0, seed=5)])
    traced = jax.jit(lambda number: sample(logits, settings, number))
    assert [traced(np.int32(number)).item() for number in range(20)] == a[:20].tolist()


def test_a_filter_does_not_change_what_is_drawn_from_its_inside():
    """The random numbers belong to the tokens: a draw that a filter would keep is the same with the filter."""
    logits = np.random.default_rng(2).normal(size=V)
    free = draw(logits, Sampling(temperature=1.0), np.arange(200))
    filtered = draw(logits, Sampling(temperature=1.0, top_k=10), np.arange(200))
    inside = np.isin(free, np.argsort(-logits)[:10])
    assert 50 < inside.sum() < 200
    np.testing.assert_array_equal(free[inside], filtered[inside])


@pytest.mark.parametrize("settings", [Sampling(temperature=0), Sampling()], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_not_finite_give_no_token(bad, settings):
    logits = np.zeros((3, 5), np.float32)
    logits[1, 3] = bad
    logits[2, :4] = -np.inf
    first, second, third = draw(logits, settings)
    assert 0 <= first < 5
    assert (second, third) == (-1, 4)


def test_ids_beyond_the_vocabulary_are_never_drawn():
    logits = np.tile(np.arange(10, dtype=np.float32), (200, 1))
    settings = stack_settings([Sampling(temperature=0)] + [Sampling(temperature=5.0)] * 199)
    tokens = np.asarray(sample(logits, settings, np.arange(200, dtype=np.int32), vocab_size=7))
    assert tokens[0] == tokens.max() == 6


def test_bfloat16_scores_are_sampled_as_float32():
    """In bfloat16 a sum of 500 equal probabilities stops growing long before 1."""
    logits = jnp.zeros((256, 500), jnp.bfloat16)
    tokens = sample(logits, stack_settings([Sampling(top_p=0.99)] * 256), np.arange(256, dtype=np.int32))
    assert 450 < tokens.max() < 495


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("temperature", -0.1, "temperature must be 0 (greedy) or a positive number, got -0.1"),
        ("temperature", float("nan"), "temperature must be 0 (greedy) or a positive number, got nan"),
        ("temperature", float("inf"), "temperature must be 0 (greedy) or a positive number, got inf"),
        ("top_k", -1, "top_k must be 0 (off) or a positive whole number, got -1"),
        ("top_p", 0.0, "top_p must be above 0 and at most 1 (off), got 0.0"),
        ("top_p", 1.01, "top_p must be above 0 and at most 1 (off), got 1.01"),
        ("top_p", float("nan"), "top_p must be above 0 and at most 1 (off), got nan"),
        ("min_p", -0.5, "min_p must be from 0 (off) to 1, got -0.5"),
        ("min_p", 1.5, "min_p must be from 0 (off) to 1, got 1.5"),
        ("seed", -1, "seed must be a whole number from 0 to 4294967295, got -1"),
        ("seed", 2**32, "seed must be a whole number from 0 to 4294967295, got 4294967296"),
    ],
)
def test_values_out_of_range(setting, value, message):
    with pytest.raises(UserError) as error:
        Sampling(**{setting: value})
    assert str(error.value) == message


def test_other_settings_compile_nothing():
    draw(np.zeros(3), Sampling())
    compiled: Any = sample
    before = compiled._cache_size()
    for settings in (Sampling(temperature=0), Sampling(top_k=3, seed=9), Sampling(top_p=0.3, min_p=0.1)):
        draw(np.zeros(3), settings, 7)
    assert compiled._cache_size() == before
