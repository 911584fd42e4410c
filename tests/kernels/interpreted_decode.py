"""Runs the Triton kernels of paired decoding in Triton's interpreter: python interpreted_decode.py OUT.npz

A program of its own, because TRITON_INTERPRET must be set before triton is imported. No torch is needed: a few
methods make a NumPy array pass for a tensor.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from decode_cases import Case, make_case

from pallas_kernels.paired_decode_attention import triton_kernels
from pallas_kernels.paired_decode_attention.triton import Config, launches

# Bfloat16 products are wrong in this interpreter: float32 for the 16-bit path, and float16.
SMALL = Config(block=16, programs=12, least=16, most=32)
CASES = {
    "ragged": make_case(lengths=[0, 1, 7, 8, 9, 40], S=40, W=8, N=4, K=2),
    "no multiple of the block, window of one": make_case(lengths=[37, 21], S=37, W=1, N=3, K=1),
    "window beyond the cache": make_case(lengths=[33, 48], S=48, W=1000),
    "many rows": make_case(lengths=[50], S=64, W=20, N=12, K=1),
    "int8": make_case(lengths=[0, 1, 40, 63], S=64, W=8, N=4, K=2, cache="int8"),
    "float8": make_case(lengths=[0, 1, 40, 63], S=64, W=8, N=4, K=2, cache="float8_e4m3fn"),
    "int8, queries beyond float16": make_case(lengths=[30], S=32, W=8, cache="int8", spread=2.0**20),
}
SCALE = {"int8, queries beyond float16": 2.0**-22}
SINGLE = {"one row": (CASES["ragged"], None), "one row with a window": (CASES["ragged"], 12)}


class Tensor:
    """What the interpreter asks of a torch.Tensor, over the memory of a contiguous array."""

    device = "cpu"

    def __init__(self, array: np.ndarray):
        self.array = np.ascontiguousarray(array)

    @property
    def dtype(self):
        names = {"float8_e4m3fn": tl.float8e4nv}
        return names.get(self.array.dtype.name) or getattr(tl, self.array.dtype.name)

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def new_empty(self, *_, **__):
        return Tensor(np.empty(0, self.array.dtype))

    def set_(self, storage, *_):
        self.array = storage.array

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def cpu(self):
        return self

    def copy_(self, other):
        assert other.array is self.array


@triton.jit
def columns_apart(words, CACHE: tl.constexpr):
    """The function of this name without assembly, which the interpreter does not know."""
    even, odd = words.to(tl.int8), (words >> 8).to(tl.int8)
    if CACHE == tl.int8:
        return even.to(tl.float16), odd.to(tl.float16)
    return even.to(CACHE, bitcast=True).to(tl.float16), odd.to(CACHE, bitcast=True).to(tl.float16)


triton_kernels.columns_apart = columns_apart


def attend(q: np.ndarray, windows: tuple[int, ...], case: Case, scale: float) -> np.ndarray:
    """What `triton.attention` does, with the interpreter in place of jax-triton; q and output [B, R, N, H]."""
    batch, num_kv_heads = case.k_cache.shape[:2]
    split, merge = launches(q.shape, case.k_cache.shape, windows, scale, SMALL)
    rows = split["R"] * split["G"]
    partial = np.full((batch, num_kv_heads, split["SPLITS"], rows, q.shape[3]), np.nan, np.float32)
    lse, out = np.full(partial.shape[:4], np.nan, np.float32), np.full_like(q, np.nan)
    ones = np.ones((batch, num_kv_heads), np.float32)
    k_scale, v_scale = (Tensor(case.scales.get(name, ones)) for name in ("k_scale", "v_scale"))
    arrays = [Tensor(x) for x in (q, *case.cache, case.lengths)]
    partial, lse, out = Tensor(partial), Tensor(lse), Tensor(out)
    triton_kernels.attend_to_split[split["SPLITS"], num_kv_heads, batch](*arrays, k_scale, partial, lse, **split)
    triton_kernels.merge_splits[rows, num_kv_heads, batch](partial, lse, v_scale, out, **merge)
    return out.array


def main(path: str) -> None:
    results = {}
    for name, case in CASES.items():
        capacity, head_size = case.k_cache.shape[2:]
        q = np.stack(case.queries, axis=1)
        results[name] = attend(q, (min(case.window, capacity), capacity), case, SCALE.get(name, head_size**-0.5))
    for name, (case, window) in SINGLE.items():
        capacity, head_size = case.k_cache.shape[2:]
        results[name] = attend(case.q_ctx[:, None], (window or capacity,), case, head_size**-0.5)
    np.savez(path, **results)


if __name__ == "__main__":
    main(sys.argv[1])
