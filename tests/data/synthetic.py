"""Documents for the tests of windows and their order."""

import itertools

import numpy as np


def numbered_documents(lengths, first=0):
    """Documents of the given lengths; their tokens are first, first + 1, ..., so each tells its position."""
    bounds = np.cumsum([first, *lengths])
    return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]


def into_shards(documents, count):
    """Deals the documents in order into at most `count` shards."""
    size = -(-len(documents) // count)
    return [documents[i : i + size] for i in range(0, len(documents), size)]
