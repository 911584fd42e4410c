"""Says where a run hangs."""

import faulthandler
import sys
import threading
import time
from types import TracebackType
from typing import TextIO


class Watchdog:
    """A thread that prints the stage and the stacks of all threads when nothing was reported for a while.

    It reports each stage at most once and never ends the run: a hang may resolve.

    Args:
      seconds: longest silence that is normal.
      stream: where to print, with a file descriptor; None is standard error.
    """

    def __init__(self, seconds: float, stream: TextIO | None = None):
        self._seconds = seconds
        self._stream = stream
        self._entered = ("starting", time.monotonic())
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def at(self, stage: str) -> None:
        """Reports progress: the run enters `stage`, for example "step 12", "saving", "compiling"."""
        self._entered = (stage, time.monotonic())

    def close(self) -> None:
        """Stops the thread."""
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self) -> None:
        reported = None
        while not self._closing.wait(self._seconds / 10):
            entered = self._entered
            silence = time.monotonic() - entered[1]
            if entered is not reported and silence > self._seconds:
                self._report(entered[0], silence)
                reported = entered

    def _report(self, stage: str, silence: float) -> None:
        stream = self._stream or sys.stderr
        if stage == "compiling":
            line = f"watchdog: still compiling after {silence:.0f} s; a large model can take several minutes."
        else:
            line = f"watchdog: no progress for {silence:.0f} s; the run hangs at: {stage}."
        print(f"{line} Stacks of all threads:", file=stream, flush=True)
        faulthandler.dump_traceback(file=stream, all_threads=True)
