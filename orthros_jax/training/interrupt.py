"""SIGTERM and SIGINT as a request to save and stop."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class StopSignal:
    """While the context is open, SIGTERM and SIGINT set a flag instead of ending the process.

    The loop looks at `requested` wherever it can stop. Signals may repeat, except that the third SIGINT acts
    as it did before: somebody hammers Ctrl-C and wants out without a save. Outside the main thread, where
    Python allows no handlers, the flag is never set.

    Attributes:
      requested: whether a signal has arrived.
      signal_name: the first signal's name, for example "SIGTERM", or None.
    """

    def __init__(self):
        self.requested = False
        self.signal_name: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._interrupts = 0

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number in list(self._previous):
            self._restore(number)

    def _restore(self, number: signal.Signals) -> None:
        # None stands for a handler that was not installed by Python and cannot be put back.
        previous = self._previous.pop(number, None)
        signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        received = signal.Signals(number)
        self._interrupts += received == signal.SIGINT
        if self._interrupts == 3:
            self._restore(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        if self.requested:
            return
        self.requested = True
        self.signal_name = received.name
        line = f"\n{received.name} received: saving a checkpoint and stopping"
        if received == signal.SIGINT:
            line += " (two more to quit at once without saving)"
        # print is not re-entrant: the signal may have interrupted another print.
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{line}\n".encode())


class AgreedStop:
    """A stop request that every process of a run obeys at the same step, whichever of them the signal has reached.

    With each step the processes add up their requests on the devices; whoever reads a step's metrics reads that sum
    as well, and all have read it by the same step. One process alone needs no vote.
    """

    def __init__(self, stop: StopSignal, mesh: Mesh):
        self._stop = stop
        self._alone = jax.process_count() == 1
        self._agreed = False
        self._each_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._count = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))

    @property
    def requested(self) -> bool:
        return self._stop.requested if self._alone else self._agreed

    @property
    def cause(self) -> str:
        return self._stop.signal_name or "a signal to another process"

    def vote(self) -> jax.Array | None:
        """Starts to add up the requests; None where there is nobody to agree with."""
        if self._alone:
            return None
        own = np.full(jax.local_device_count(), self._stop.requested, np.int32)
        return self._count(jax.make_array_from_process_local_data(self._each_device, own))

    def note(self, votes: jax.Array | None) -> None:
        """Takes note of what `vote` has returned; waits for it."""
        self._agreed |= votes is not None and bool(votes)
