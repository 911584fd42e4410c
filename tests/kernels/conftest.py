"""Backends for accelerators that a CPU can run in an interpreter."""

from functools import partial

import jax
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.dual_stream_attention import tpu


@pytest.fixture(autouse=True)
def dual_stream_interpreter(request, monkeypatch):
    """Lets a test with impl="tpu" run on a CPU: Pallas interprets the kernels, and the backend refuses nothing.

    Compilation takes nearly all the time of such a test, hence without optimisations.
    """
    if not hasattr(request.node, "callspec") or request.node.callspec.params.get("impl") != "tpu":
        yield
        return
    monkeypatch.setattr(tpu, "unsupported", lambda *_: None)
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
