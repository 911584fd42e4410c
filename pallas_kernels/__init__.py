"""Attention operations with several backends each; imports jax and numpy only."""

from pallas_kernels.dual_stream_attention.api import (
    cross_attention,
    dual_stream_attention,
    sliding_window_attention,
)

__all__ = ["cross_attention", "dual_stream_attention", "sliding_window_attention"]
