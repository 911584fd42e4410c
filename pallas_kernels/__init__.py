"""Attention operations with several backends each; imports jax and numpy only."""

from pallas_kernels.dual_stream_attention.api import (
    cache_attention,
    cross_attention,
    dual_stream_attention,
    sliding_window_attention,
)
from pallas_kernels.paired_decode_attention.api import (
    decode_attention,
    paired_decode_attention,
    sharded_decode_attention,
)

__all__ = [
    "cache_attention",
    "cross_attention",
    "decode_attention",
    "dual_stream_attention",
    "paired_decode_attention",
    "sharded_decode_attention",
    "sliding_window_attention",
]
