"""Block sizes of the Hopper kernels, and the times that chose them; docs/kernels_log.md has what was slower.

The kernels of a swept stream (`hopper_window`) derive theirs from the window and the shape.
"""

from typing import Any, NamedTuple

import jax

from pallas_kernels.dispatch import target_device


class Setting(NamedTuple):
    """What a kernel takes from `min_keys` keys a row on, up to the next such entry of its head size.

    Attributes:
      kernel: name of the function that takes `options`.
      milliseconds: of the kernel alone at `shape`, measured on `date` with version `jax` of JAX; for "forward" and
        "query_gradient" the stream that sees all keys, for "key_gradients" both streams, window 128.
    """

    kernel: str
    device: str
    dtype: str
    head_size: int
    min_keys: int
    options: dict[str, Any]
    milliseconds: float
    shape: str
    date: str
    jax: str


_H200 = ("NVIDIA H200", "bfloat16")
_SHORT_64, _SHORT, _LONG = "B8 T2048 N32/32 H64", "B8 T2048 N16/16 H128", "B1 T16384 N32/8 H128"
_MEASURED = ("2026-11-30", "0.11.2")
_KEYS_128, _ROWS_64 = {"block": 128, "stages": 2}, {"stages": 2}

SETTINGS = (
    Setting("forward", *_H200, 64, 0, _KEYS_128, 0.432, _SHORT_64, *_MEASURED),
    Setting("forward", *_H200, 128, 0, _KEYS_128, 0.311, _SHORT, *_MEASURED),
    Setting("forward", *_H200, 128, 8192, _KEYS_128, 3.822, _LONG, *_MEASURED),
    Setting("query_gradient", *_H200, 64, 0, _KEYS_128, 0.521, _SHORT_64, *_MEASURED),
    Setting("query_gradient", *_H200, 128, 0, _KEYS_128, 0.389, _SHORT, *_MEASURED),
    Setting("query_gradient", *_H200, 128, 8192, _KEYS_128, 4.733, _LONG, *_MEASURED),
    Setting("key_gradients", *_H200, 64, 0, _ROWS_64, 0.835, _SHORT_64, *_MEASURED),
    Setting("key_gradients", *_H200, 128, 0, _ROWS_64, 0.607, _SHORT, *_MEASURED),
    Setting("key_gradients", *_H200, 128, 8192, _ROWS_64, 7.050, _LONG, *_MEASURED),
)


def options(kernel: str, k: jax.Array | jax.ShapeDtypeStruct) -> dict[str, Any]:
    """Options of a kernel for keys [B, T, K, H], H = 64 or 128.

    A device or type without measurements takes the entries of another.
    """
    device = target_device().device_kind
    found = [s for s in SETTINGS if (s.kernel, s.head_size) == (kernel, k.shape[3]) and s.min_keys <= k.shape[1]]
    return max(found, key=lambda s: (s.device == device, s.dtype == k.dtype, s.min_keys)).options
