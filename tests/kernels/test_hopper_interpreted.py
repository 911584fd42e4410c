"""The Hopper kernels in JAX's interpreter of Mosaic GPU kernels: on a CPU, with NaN in all memory not yet written.

A case takes many seconds, so each covers several things at once.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_blind_rows_are_zero, assert_numerics, make_case, run

from pallas_kernels import dual_stream_attention
from pallas_kernels.dual_stream_attention import hopper, hopper_window

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jax.__version_info__[:2] != (0, 11), reason="needs Python 3.12 and JAX 0.11"),
]

CASES = {
    "documents of one token, padding, a row of padding, window 127, grouped heads": make_case(
        T=200, W=127, N=2, K=1, H=64, segments=[[(1, 1), (2, 1), (3, 70), (4, 110)], []]
    ),
    "window 128, seven output rows, a key head for each query head": make_case(
        T=256, W=128, N=2, K=2, H=128, B=1, P=7, out_index=[[0, 5, 5, 128, 200, 255, -1]]
    ),
    "window 129, one output row, packed": make_case(
        T=330, W=129, N=1, K=1, H=64, P=1, segments=[[(1, 330)], [(2, 30), (3, 200)]], out_index=[[329], [29]]
    ),
    "window 1, more output rows than keys, in any order": make_case(
        B=1, T=130, W=1, N=2, K=1, H=128, P=140, out_index=[[*range(129, -1, -1), *range(10)]]
    ),
    "window beyond T, output window, two key heads": make_case(B=1, T=120, W=1000, out_window=65, N=4, K=2, H=64),
}


@pytest.fixture
def interpreted(monkeypatch):
    """A context manager in which impl="hopper" runs in the interpreter."""
    from mosaic_gpu_interpreter import interpreted

    monkeypatch.setattr(hopper, "unsupported", lambda *_: None)
    return interpreted


def _assert_right(case, interpreted):
    with interpreted():
        found = assert_numerics(partial(dual_stream_attention, impl="hopper", **case.mask), case)
    assert_blind_rows_are_zero(found, case)


@pytest.mark.parametrize("name", CASES)
def test_numerics_rule_and_blind_rows(name, interpreted):
    _assert_right(CASES[name], interpreted)


def test_sweep_of_many_tiles(interpreted, monkeypatch):
    """As in a batch that fills the chip: a block of the grid sweeps over eight tiles and reuses its ring of keys."""
    monkeypatch.setattr(hopper_window, "chunk_of", lambda *_: 8)
    segments = [[(1, 70), (2, 1), (3, 400)]]
    _assert_right(make_case(B=1, T=512, W=129, N=1, K=1, H=64, P=1, segments=segments, out_index=[[3]]), interpreted)


def test_one_token_in_float16(interpreted):
    """The gradients of query and key are zero but for the rounding of two sums of 64 products in float32."""
    case = make_case(B=1, T=1, W=1, N=1, K=1, H=64)
    with interpreted():
        found = run(partial(dual_stream_attention, impl="hopper", **case.mask), case, jnp.float16)
    for name, truth in case.truth().items():
        np.testing.assert_allclose(found[name], truth, rtol=2**-11, atol=2e-6, err_msg=name)
