"""Cases of `interpreted_decode.py`, apart from it because it must not be imported where triton compiles."""

from decode_cases import make_case

_RAGGED = make_case(lengths=[0, 1, 7, 8, 9, 40], S=40, W=8, N=4, K=2)

CASES = {
    # with the factor on the scores, None for the usual one
    "ragged": (_RAGGED, None),
    "no multiple of the block, window of one": (make_case(lengths=[37, 21], S=37, W=1, N=3, K=1), None),
    "window beyond the cache": (make_case(lengths=[33, 48], S=48, W=1000), None),
    "many rows": (make_case(lengths=[50], S=64, W=20, N=12, K=1), None),
    "int8": (make_case(lengths=[0, 1, 40, 63], S=64, W=8, N=4, K=2, cache="int8"), None),
    "float8": (make_case(lengths=[0, 1, 40, 63], S=64, W=8, N=4, K=2, cache="float8_e4m3fn"), None),
    "int8, queries beyond float16": (make_case(lengths=[30], S=32, W=8, cache="int8", spread=2.0**20), 2.0**-22),
}
SINGLE = {"one row": (_RAGGED, None), "one row with a window": (_RAGGED, 12)}
