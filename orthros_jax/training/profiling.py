"""A profile of the steps that `training.profile_steps` names."""

import contextlib
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import jax


class StepProfile:
    """Records what host and devices do in the steps of a window, into files that XProf and Perfetto open.

    A run that starts inside the window records the rest of it, and one that starts after it nothing. Of several
    processes each writes a folder of its own, for the files are named after the host.

    Args:
      window: first and last step; None records nothing.
      folder: where to write.
      report: gets one message, which says where the profile is and how to open it.
    """

    def __init__(self, window: Sequence[int] | None, folder: Path, report: Callable[[str], None]):
        self._steps = range(window[0], window[1] + 1) if window else range(0)
        several = jax.process_count() > 1
        self._folder = folder / f"process-{jax.process_index()}" if several else folder
        self._report = report
        self._recorded: list[int] | None = None

    def starts_with(self, step: int) -> bool:
        """Whether `start` comes before this step."""
        return self._recorded is None and step in self._steps

    def ends_with(self, step: int) -> bool:
        """Whether `close` comes after this step."""
        return self._recorded is not None and step == self._steps[-1]

    def start(self) -> None:
        """Starts to record; the steps before have ended."""
        jax.profiler.start_trace(self._folder)
        self._recorded = []

    def step(self, number: int) -> contextlib.AbstractContextManager:
        """Names the work inside the block as that of a step, if it is recorded."""
        if self._recorded is None:
            return contextlib.nullcontext()
        self._recorded.append(number)
        return jax.profiler.StepTraceAnnotation("train", step_num=number)

    def close(self) -> None:
        """Writes what is recorded; does nothing without."""
        if self._recorded is None:
            return
        jax.profiler.stop_trace()
        first, last, self._recorded = self._recorded[0], self._recorded[-1], None
        self._steps = range(0)
        folder = shlex.quote(str(self._folder))
        self._report(
            f"Profile  of steps {first:,} to {last:,} in {folder}: open the .trace.json.gz there in "
            f"https://ui.perfetto.dev, or see more with `pip install xprof` and `xprof --logdir {folder}`"
        )
