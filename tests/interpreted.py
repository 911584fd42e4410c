"""Kernels for TPUs on a CPU, in Pallas's interpreter."""

from functools import partial

from jax.experimental import pallas as pl

from pallas_kernels.dual_stream_attention import tpu
from pallas_kernels.paired_decode_attention import tpu as decode_tpu


def interpret_tpu_kernels(monkeypatch) -> None:
    """From here on impl="tpu" is interpreted, and refuses nothing."""
    monkeypatch.setattr(tpu, "unsupported", lambda *_: None)
    monkeypatch.setattr(decode_tpu, "unsupported", lambda *_: None)
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
