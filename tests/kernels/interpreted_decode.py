"""Runs the Triton kernels of paired decoding in Triton's interpreter: python interpreted_decode.py OUT.npz

A program of its own, because TRITON_INTERPRET must be set before triton is imported. No torch is needed: a few
methods make a NumPy array pass for a tensor. Bfloat16 products are wrong in this interpreter: the queries and the
16-bit cache are float32 here, and the products of an 8-bit cache float16 as on the GPU.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from decode_cases import Case
from interpreted_decode_cases import CASES, SINGLE

from pallas_kernels.paired_decode_attention import triton_kernels
from pallas_kernels.paired_decode_attention.triton import Config, launches

# Several splits and several blocks a split for caches of a few tens of keys.
SMALL = Config(block=16, programs=40, least=32, most=64)


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
    if CACHE.is_int8():
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
    triton_kernels.attend_to_split[split["SPLITS"], num_kv_heads, batch](*arrays, k_scale, partial, lse, **split)  # pyright: ignore
    triton_kernels.merge_splits[rows, num_kv_heads, batch](partial, lse, v_scale, out, **merge)  # pyright: ignore
    return out.array


def main(path: str) -> None:
    results = {}
    for name, (case, scale) in CASES.items():
        capacity, head_size = case.k_cache.shape[2:]
        q = np.stack(case.queries, axis=1)
        results[name] = attend(q, (min(case.window, capacity), capacity), case, scale or head_size**-0.5)
    for name, (case, window) in SINGLE.items():
        capacity, head_size = case.k_cache.shape[2:]
        results[name] = attend(case.q_ctx[:, None], (window or capacity,), case, head_size**-0.5)
    np.savez(path, **results)


if __name__ == "__main__":
    main(sys.argv[1])
