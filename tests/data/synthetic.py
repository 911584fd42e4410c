"""Documents for the tests of windows and their order."""

import numpy as np


def numbered_documents(lengths, first=0):
    """Documents of the given lengths whose tokens are first, first + 1, ...: each token tells its own position."""
    bounds = np.cumsum([first, *lengths])
    return [list(range(a, b)) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def into_shards(documents, count):
    """Deals the documents in order into at most `count` shards."""
    size = -(-len(documents) // count)
    return [documents[i : i + size] for i in range(0, len(documents), size)]
