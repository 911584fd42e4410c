"""The progress of a run on the terminal."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TextIO

import jax
from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """One line that shows step, loss, tokens/s and the time left.

    A terminal gets a bar that is redrawn in place. A log file gets a plain line every 10 seconds at most,
    besides those of the first and the last step. Both go to standard error, and from process 0 only.

    Args:
      total_steps: step at which the run ends.
      first_step: completed steps at the start.
      enabled: whether to show progress; messages are printed in any case.
    """

    def __init__(self, total_steps: int, first_step: int = 0, *, enabled: bool = True):
        self._total, self._first = total_steps, first_step
        self._is_writer = jax.process_index() == 0
        self._enabled = enabled and self._is_writer
        self._started = time.monotonic()
        self._last_line: float | None = None
        self._bar = None
        if self._enabled and sys.stderr.isatty():
            layout = "step {n_fmt}/{total_fmt} |{bar}| {desc} [{elapsed}<{remaining}]"
            self._bar = tqdm(
                total=total_steps, initial=first_step, bar_format=layout, dynamic_ncols=True, file=sys.stderr
            )

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Shows the state after `step` completed steps."""
        if not self._enabled:
            return
        numbers = f"loss {loss:.4f} {_short(tokens_per_second)} tokens/s"
        if self._bar is not None:
            self._bar.set_description_str(numbers, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if self._last_line is None or step >= self._total or now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = (now - self._started) / max(step - self._first, 1) * (self._total - step)
            with _outlives_reader(sys.stderr):
                print(f"step {step}/{self._total} {numbers} {_clock(left)} left", file=sys.stderr, flush=True)

    def message(self, text: str) -> None:
        """Prints lines to standard output, above the bar if there is one."""
        if not self._is_writer:
            return
        with _outlives_reader(sys.stdout):
            if self._bar is not None:
                self._bar.write(text, file=sys.stdout)
                sys.stdout.flush()
            else:
                print(text, flush=True)

    def close(self) -> None:
        """Leaves the bar as it is and moves to the next line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


@contextlib.contextmanager
def _outlives_reader(stream: TextIO) -> Iterator[None]:
    """Goes on without output once the other end of a pipe is closed: a run must not lose its work to that."""
    try:
        yield
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
