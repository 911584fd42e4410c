"""Cases of `interpreted_decode.py`, apart from it because it must not be imported where triton compiles."""

import numpy as np
from decode_cases import Case, make_case, without_keys

_RAGGED = make_case(lengths=[0, 1, 7, 8, 9, 40], S=40, W=8, N=4, K=2)


def _faint_case() -> Case:
    """One key has a score 18 above the others' and a value of 0: the output, about 1, is what exp(-18) weighs."""
    q = np.zeros((1, 1, 16), np.float32)
    k, v = np.zeros((1, 1, 32, 16), np.int8), np.ones((1, 1, 32, 16), np.int8)
    q[..., 0], k[..., 0, 0], v[..., 0, :] = 1, 100, 0
    scales = {"k_scale": 0.18, "v_scale": np.exp(18) / 31}
    scales = {name: np.full((1, 1), x, np.float32) for name, x in scales.items()}
    return Case(q, q, k, v, np.asarray([32], np.int32), 1000, scales)


CASES = {
    # with the factor on the scores, None for the usual one
    "ragged": (_RAGGED, None),
    "no multiple of the block, window of one": (make_case(lengths=[37, 21], S=37, W=1, N=3, K=1), None),
    "window beyond the cache": (make_case(lengths=[33, 48], S=48, W=1000), None),
    "a length beyond the cache reads no other head": (make_case(lengths=[20], S=16, W=1000), None),
    "more splits than the merge takes at a time": (make_case(lengths=[2500], S=2500, W=500, N=1, K=1), None),
    "many rows": (make_case(lengths=[50], S=64, W=20, N=12, K=1), None),
    "int8": (make_case(lengths=[0, 1, 40, 63], S=64, W=8, N=4, K=2, cache="int8"), None),
    "float8": (make_case(lengths=[0, 1, 40, 63], S=64, W=8, N=4, K=2, cache="float8_e4m3fn"), None),
    "int8, queries beyond float16": (make_case(lengths=[30], S=32, W=8, cache="int8", spread=2.0**20), 2.0**-22),
    "int8, weights below float16": (_faint_case(), 1.0),
}
SINGLE: dict[str, tuple[Case, int | None]] = {
    "one row": (_RAGGED, None),
    "one row with a window, before which nothing is read": (without_keys(_RAGGED, before=28), 12),
}
