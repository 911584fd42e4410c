"""Block sizes of the Hopper kernels, and the times that chose them; docs/kernels_log.md has what was slower.

The kernels of a swept stream (`hopper_window`) derive theirs from the window and the shape.
"""

from typing import Any, NamedTuple

import jax

from pallas_kernels.dispatch import target_device


class Setting(NamedTuple):
    """What a kernel takes from `min_keys` keys a row on, up to the next such entry of its head size.

    Attributes:
      kernel: name of the function that takes `options`; "key_gradients, sum_queries" with the gradient of the queries.
      milliseconds: of the kernel alone at `shape`, measured on `date` with version `jax` of JAX.
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


_A, _B, _C = "B8 T2048 N16/16 H128", "B8 T2048 N32/32 H64", "B1 T16384 N32/8 H128"
_KEYS_128, _ROWS_64 = {"block": 128, "stages": 2}, {"stages": 2}
_H200 = ("NVIDIA H200", "bfloat16")
_MEASURED = ("2026-11-29", "0.11.2")

SETTINGS = (
    Setting("forward", *_H200, 64, 0, _KEYS_128, 0.416, _B, *_MEASURED),
    Setting("forward", *_H200, 128, 0, _KEYS_128, 0.281, _A, *_MEASURED),
    Setting("forward", *_H200, 128, 8192, _KEYS_128, 3.86, _C, *_MEASURED),
    Setting("query_gradient", *_H200, 64, 0, _KEYS_128, 0.5, _B, *_MEASURED),
    Setting("query_gradient", *_H200, 128, 0, _KEYS_128, 0.356, _A, *_MEASURED),
    Setting("query_gradient", *_H200, 128, 8192, _KEYS_128, 4.74, _C, *_MEASURED),
    Setting("key_gradients", *_H200, 64, 0, _ROWS_64, 0.812, _B, *_MEASURED),
    Setting("key_gradients", *_H200, 128, 0, _ROWS_64, 0.625, _A, *_MEASURED),
    Setting("key_gradients", *_H200, 128, 8192, _ROWS_64, 7.04, _C, *_MEASURED),
    Setting("key_gradients, sum_queries", *_H200, 128, 8192, _ROWS_64, 10.63, _C, *_MEASURED),
)


def options(kernel: str, k: jax.Array) -> dict[str, Any] | None:
    """Options of a kernel for keys [B, T, K, H], None if it is not to be used for them.

    A device or type without measurements takes the entries of another.
    """
    device = target_device().device_kind
    found = [s for s in SETTINGS if (s.kernel, s.head_size) == (kernel, k.shape[3]) and s.min_keys <= k.shape[1]]
    if not found:
        return None
    return max(found, key=lambda s: (s.device == device, s.dtype == k.dtype, s.min_keys)).options
