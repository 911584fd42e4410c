"""The choice of a backend, shared by every operation: what `impl` means and how the choice is logged."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import jax

_logger = logging.getLogger("pallas_kernels")
_target: ContextVar[Any] = ContextVar("target", default=None)


def target_device() -> Any:
    """The device that backends are chosen for: the one of `compiling_for`, else the default device."""
    return _target.get() or jax.devices()[0]


@contextlib.contextmanager
def compiling_for(device: Any) -> Iterator[None]:
    """Inside, backends are chosen for `device`, which this machine need not have."""
    token = _target.set(device)
    try:
        yield
    finally:
        _target.reset(token)


def choose_backend(
    op: str, impl: str, backends: Mapping[str, ModuleType], unsupported: Callable[[ModuleType], str | None]
) -> ModuleType:
    """The backend that `impl` names, or for "auto" the first of `backends` that supports the call.

    Args:
        op: name of the operation, for messages.
        impl: "auto" or a key of `backends`.
        backends: by name, in the order in which "auto" tries them; the last one supports every call.
        unsupported: one sentence why a backend cannot do the call, or None if it can.

    Raises:
        ValueError: `impl` names no backend.
        NotImplementedError: the backend that `impl` names does not support the call; it never falls back.
    """
    if impl != "auto":
        if impl not in backends:
            raise ValueError(f"impl must be one of {', '.join(('auto', *backends))}, got {impl!r}")
        reason = unsupported(backends[impl])
        if reason is not None:
            raise NotImplementedError(f"{op}: impl={impl!r} is not possible here: {reason}")
        return backends[impl]
    passed_over = []
    for name, backend in backends.items():
        reason = unsupported(backend)
        if reason is None:
            log_once("; ".join([f"{op}: impl=auto takes {name}", *passed_over]))
            return backend
        passed_over.append(f"not {name}: {reason}")
    raise AssertionError("the last backend supports every call")


@functools.cache
def log_once(message: str) -> None:
    _logger.info(message)


def is_nvidia_gpu(device: Any) -> bool:
    """By its name: what the runtime says of its platform is missing where a program is only compiled."""
    return device.device_kind.startswith("NVIDIA")


def why_not_nvidia_gpu(capability: float) -> str | None:
    """Reason why the target device is no NVIDIA GPU of at least this compute capability, or None."""
    device = target_device()
    if not is_nvidia_gpu(device):
        return f"it needs an NVIDIA GPU, and the device is {device.device_kind}"
    if float(device.compute_capability) < capability:
        return f"it needs compute capability {capability}, and {device.device_kind} has {device.compute_capability}"
    return None
