"""How much of a process's time its steps take."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import jax


class Goodput:
    """Adds up the time of steps.

    A step's time runs from its dispatch, or from the end of the step before it where that is later, to its own end on
    the devices. So what the host does while the devices compute costs nothing, and what they wait for does not count.

    A thread notes when each step ends: the host reads a step's metrics only after it has dispatched the next one, for
    which it may have waited.

    Args:
      started: start of the process by `time.perf_counter`.

    Attributes:
      steps: number of steps added.
      useful_seconds: time of those that were useful.
    """

    def __init__(self, started: float):
        self.steps = 0
        self.useful_seconds = 0.0
        self._started = self._last_end = started
        self._thread = ThreadPoolExecutor(1, "end-of-step")

    def __enter__(self) -> "Goodput":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.shutdown()

    def end_of(self, result: jax.Array) -> Future[float]:
        """When `result` of a step that is under way will have been computed, by `time.perf_counter`."""
        return self._thread.submit(_end_of, result)

    def add(self, dispatched: float, ended: float, *, is_useful: bool) -> None:
        """Adds the next step in order; one that was skipped is not useful."""
        self.steps += 1
        if is_useful:
            self.useful_seconds += ended - max(dispatched, self._last_end)
        self._last_end = ended

    def wall_seconds(self) -> float:
        return time.perf_counter() - self._started

    def share(self) -> float:
        """Useful seconds as a share of the time since the start of the process, 0 to 1."""
        return self.useful_seconds / self.wall_seconds()


def _end_of(result: jax.Array) -> float:
    jax.block_until_ready(result)
    return time.perf_counter()
