"""Layouts of the four phases against a brute-force reading of their definition, and what they refuse."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthros_jax import streams


def _all_segmentations(length):
    """Every way to cut `length` rows into documents, with every amount of padding behind them."""
    for padding in range(length + 1):
        rows = length - padding
        for cuts in itertools.product((0, 1), repeat=max(rows - 1, 0)):
            ids = list(itertools.accumulate((1, *cuts)))[:rows]
            yield ids + [0] * padding


def _batch(num_tokens):
    segments = np.array(list(_all_segmentations(num_tokens)))
    assert len(segments) == 2**num_tokens
    tokens = np.random.default_rng(num_tokens).integers(0, 1000, segments.shape)
    return tokens, segments


def _expected_positions(segment_ids):
    return [[row[:t].count(row[t]) for t in range(len(row))] for row in segment_ids.tolist()]


def _predicting_rows(segment_ids):
    """Rows whose next token belongs to the same document."""
    return [[t for t in range(len(row) - 1) if row[t] != 0 and row[t] == row[t + 1]] for row in segment_ids.tolist()]


@pytest.mark.parametrize("num_rows", range(1, 13))
def test_pretraining(num_rows):
    tokens, segments = _batch(num_rows + 1)
    layout, targets = streams.pretraining(jnp.asarray(tokens, jnp.int32), jnp.asarray(segments, jnp.int32))
    assert layout.out_index is None
    assert layout.segment_ids is not None
    np.testing.assert_array_equal(layout.tokens, tokens[:, :num_rows])
    np.testing.assert_array_equal(layout.segment_ids, segments[:, :num_rows])
    np.testing.assert_array_equal(layout.positions, _expected_positions(segments[:, :num_rows]))
    np.testing.assert_array_equal(targets.labels, tokens[:, 1:])
    weights = np.zeros((len(tokens), num_rows))
    for b, rows in enumerate(_predicting_rows(segments)):
        weights[b, rows] = 1
    np.testing.assert_array_equal(targets.weights, weights)
    assert targets.weights.dtype == jnp.float32
    assert layout.positions.dtype == jnp.int32


def test_pretraining_without_segments_is_one_document_a_row():
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    layout, targets = streams.pretraining(tokens)
    np.testing.assert_array_equal(layout.positions, [[0, 1, 2, 3, 4]] * 2)
    np.testing.assert_array_equal(targets.weights, np.ones((2, 5)))
    np.testing.assert_array_equal(targets.labels, tokens[:, 1:])
    np.testing.assert_array_equal(layout.segment_ids, np.ones((2, 5)))


def test_the_last_token_of_a_document_predicts_nothing():
    tokens = jnp.array([[5, 6, 7, 8, 9, 10, 11]])
    _, targets = streams.pretraining(tokens, jnp.array([[1, 1, 1, 2, 2, 2, 3]]))
    np.testing.assert_array_equal(targets.weights, [[1, 1, 0, 1, 1, 0]])


@pytest.mark.parametrize("num_rows", range(1, 13))
def test_fine_tuning(num_rows):
    tokens, segments = _batch(num_rows + 1)
    random = np.random.default_rng(0)
    response = random.random(tokens.shape) < random.random((len(tokens), 1))
    wanted = [[t for t in rows if response[b, t + 1]] for b, rows in enumerate(_predicting_rows(segments))]
    most = max(map(len, wanted))
    for num_outputs in {max(most, 1), num_rows}:
        layout, targets = streams.fine_tuning(
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(segments, jnp.int32),
            jnp.asarray(response),
            num_outputs,
        )
        out_index = np.full((len(tokens), num_outputs), -1)
        for b, rows in enumerate(wanted):
            out_index[b, : len(rows)] = rows
        assert layout.out_index is not None
        np.testing.assert_array_equal(layout.out_index, out_index)
        np.testing.assert_array_equal(layout.tokens, tokens[:, :num_rows])
        np.testing.assert_array_equal(layout.segment_ids, segments[:, :num_rows])
        np.testing.assert_array_equal(layout.positions, _expected_positions(segments[:, :num_rows]))
        np.testing.assert_array_equal(targets.weights, out_index >= 0)
        labels = np.take_along_axis(tokens, out_index + 1, axis=1)
        np.testing.assert_array_equal(np.where(out_index >= 0, targets.labels, 0), np.where(out_index >= 0, labels, 0))
        assert (targets.labels >= 0).all()
    if most > 1:
        message = f"an example has {most} response tokens, more than num_outputs {most - 1}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            streams.fine_tuning(jnp.asarray(tokens), jnp.asarray(segments), jnp.asarray(response), most - 1)


def test_fine_tuning_is_traceable():
    tokens, segments = _batch(6)
    arguments = jnp.asarray(tokens), jnp.asarray(segments), jnp.asarray(tokens % 2 == 0)
    eager = streams.fine_tuning(*arguments, 5)
    traced = jax.jit(streams.fine_tuning, static_argnums=3)(*arguments, 5)
    jax.tree.map(np.testing.assert_array_equal, eager, traced)


def test_fine_tuning_refuses_more_outputs_than_rows():
    tokens = jnp.ones((1, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"^num_outputs 4 exceeds the 3 rows that can predict a token$"):
        streams.fine_tuning(tokens, tokens, tokens == 1, 4)


@pytest.mark.parametrize("num_rows", range(1, 13))
def test_prefill(num_rows):
    lengths = np.arange(num_rows + 1)
    tokens = np.random.default_rng(0).integers(0, 1000, (num_rows + 1, num_rows))
    layout = streams.prefill(jnp.asarray(tokens), jnp.asarray(lengths))
    segments = np.array([[1] * n + [0] * (num_rows - n) for n in lengths])
    np.testing.assert_array_equal(layout.tokens, tokens)
    np.testing.assert_array_equal(layout.segment_ids, segments)
    assert layout.out_index is not None
    np.testing.assert_array_equal(layout.out_index, lengths[:, None] - 1)
    expected = np.where(segments == 1, _expected_positions(segments), 0)
    np.testing.assert_array_equal(layout.positions, expected)


@pytest.mark.parametrize("num_rows", range(1, 13))
def test_decode_continues_prefill(num_rows):
    """The pair of a step stands where row `length` of a prompt one token longer would."""
    tokens, lengths = np.arange(num_rows) + 7, np.arange(num_rows)
    step = streams.decode(jnp.asarray(tokens), jnp.asarray(lengths))
    padded = np.zeros((num_rows, num_rows), int)
    padded[np.arange(num_rows), lengths] = tokens
    longer = streams.prefill(jnp.asarray(padded), jnp.asarray(lengths + 1))
    np.testing.assert_array_equal(step.tokens, streams.duplicate(longer.tokens, longer)[:, 0])
    np.testing.assert_array_equal(step.positions, streams.duplicate(longer.positions, longer)[:, 0])
    np.testing.assert_array_equal(step.positions, lengths)
    np.testing.assert_array_equal(step.lengths, lengths + 1)


def test_duplicate_copies_the_rows_of_out_index():
    rows = jnp.arange(2 * 4 * 3).reshape(2, 4, 3)
    out_index = jnp.array([[0, 3, -1], [1, 2, 3]])
    tokens = jnp.zeros((2, 4), jnp.int32)
    layout = streams.Layout(tokens, tokens, None, out_index)
    copies = streams.duplicate(rows, layout)
    np.testing.assert_array_equal(copies[0, :2], rows[0, [0, 3]])
    np.testing.assert_array_equal(copies[1], rows[1, [1, 2, 3]])
    assert streams.duplicate(rows, streams.Layout(tokens, tokens, None, None)) is rows


def test_sampled_rows_are_those_with_the_lowest_scores_among_the_rows_that_predict():
    tokens = jnp.arange(14).reshape(2, 7)
    segment_ids = jnp.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 0, 0, 0, 0, 0]])
    # Row 2 of the first sequence ends a document; in the second only row 0 predicts.
    scores = jnp.array([[0.5, 0.2, 0.0, 0.9, 0.1, 0.3], [0.7, 0.0, 0.0, 0.0, 0.0, 0.0]], jnp.float32)
    layout, targets = streams.sampled_pretraining(tokens, segment_ids, scores, 3)
    np.testing.assert_array_equal(layout.out_index, [[1, 4, 5], [0, -1, -1]])
    np.testing.assert_array_equal(targets.labels[0], [2, 5, 6])
    np.testing.assert_array_equal(targets.weights, [[1, 1, 1], [1, 0, 0]])
    assert targets.labels[1, 0] == 8


def test_sampling_all_rows_is_pretraining():
    random = np.random.default_rng(0)
    tokens = jnp.asarray(random.integers(0, 50, (2, 9)))
    segment_ids = jnp.array([[1, 1, 1, 2, 2, 2, 2, 2, 2], [1] * 9])
    scores = jnp.asarray(random.random((2, 8)), jnp.float32)
    _, every = streams.pretraining(tokens, segment_ids)
    _, drawn = streams.sampled_pretraining(tokens, segment_ids, scores, 8)
    for row in range(2):
        expected = every.labels[row][every.weights[row] == 1]
        np.testing.assert_array_equal(drawn.labels[row][drawn.weights[row] == 1], expected)
