"""The interval of visible keys against the mask's formula, row by row."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dual_stream_attention import reference
from pallas_kernels.dual_stream_attention.mask import key_ranges


def _dense(key_range, num_keys, batch):
    start, end = (np.broadcast_to(x, (batch, x.shape[1]))[..., None] for x in key_range)
    keys = np.arange(num_keys)
    return (start <= keys) & (keys < end)


def _segmentations(num_keys):
    """Every way to cut a sequence into runs, with ids that do not ascend and padding anywhere."""
    cuts = np.array(list(itertools.product((0, 1), repeat=num_keys - 1)))
    run = np.pad(np.cumsum(cuts, axis=1), ((0, 0), (1, 0)))
    ids = [5, 3, 9, 0, 8, 2, 7]
    return np.concatenate([np.take(np.roll(ids, -shift), run) for shift in range(4)]).astype(np.int32)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 6, 100])
def test_every_segmentation(window):
    segment_ids = _segmentations(6)
    batch = len(segment_ids)
    out_index = np.tile(np.array([0, 5, 2, 2, -1, 4, 6], np.int32), (batch, 1))
    for index in (None, out_index):
        found = key_ranges(
            6,
            window=window,
            segment_ids=jnp.asarray(segment_ids),
            out_index=None if index is None else jnp.asarray(index),
        )
        expected = reference.visible_keys(batch, 6, window=window, segment_ids=segment_ids, out_index=index)
        np.testing.assert_array_equal(_dense(found, 6, batch), expected)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 8])
def test_without_segments(window):
    found = key_ranges(7, window=window)
    assert found.start.shape == found.end.shape == (1, 7)
    np.testing.assert_array_equal(_dense(found, 7, 2), reference.visible_keys(2, 7, window=window))


def test_blind_rows_have_an_empty_range():
    found = key_ranges(4, window=2, segment_ids=jnp.asarray([[1, 1, 0, 0]]), out_index=jnp.asarray([[1, 2, -1, 9]]))
    np.testing.assert_array_equal(found.start, [[0, 0, 0, 0]])
    np.testing.assert_array_equal(found.end, [[2, 0, 0, 0]])
