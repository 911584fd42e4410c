"""The backends of NVIDIA GPUs by the numerics rule; run with JAX_PLATFORMS=cuda."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from numerics import assert_numerics, make_case

from pallas_kernels import dual_stream_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu",
        reason="needs an NVIDIA GPU of compute capability 8.0 or higher and JAX_PLATFORMS=cuda",
    ),
]

WHOLE = {
    "window 128": make_case(T=512, W=128, N=4, K=4, H=128),
    "grouped heads, ragged length": make_case(T=333, W=16, N=4, K=1, H=64),
    "window 2": make_case(T=200, W=2, N=2, K=2, H=64),
    "window beyond T, output window": make_case(T=256, W=1000, out_window=129, N=2, K=1, H=128),
}
PACKED = {
    "packed, padded": make_case(T=600, W=128, N=4, K=2, H=64, segments=[[(1, 1), (2, 300), (3, 250)], [(1, 600)]]),
    "output rows": make_case(T=300, W=100, P=7, N=2, K=2, H=128, out_index=[[0, 5, 5, 128, 256, 299, -1], [1] * 7]),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", WHOLE)
def test_cudnn(name, dtype):
    assert_numerics(partial(dual_stream_attention, impl="cudnn", **WHOLE[name].mask), WHOLE[name], dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", WHOLE | PACKED)
def test_xla(name, dtype):
    case = (WHOLE | PACKED)[name]
    assert_numerics(partial(dual_stream_attention, impl="xla", **case.mask), case, dtype)
