"""Backends for accelerators that a CPU can run in an interpreter."""

import jax
import pytest

from tests.interpreted import interpret_tpu_kernels


@pytest.fixture(autouse=True)
def dual_stream_interpreter(request, monkeypatch):
    """Lets a test with impl="tpu" run on a CPU: Pallas interprets the kernels, and the backend refuses nothing.

    Compilation takes nearly all the time of such a test, hence without optimisations.
    """
    if not hasattr(request.node, "callspec") or request.node.callspec.params.get("impl") != "tpu":
        yield
        return
    interpret_tpu_kernels(monkeypatch)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
