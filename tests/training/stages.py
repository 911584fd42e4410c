"""Signals to this process at a stage of a run."""

import contextlib
import os
from unittest import mock

from orthros_jax.training import trainer


@contextlib.contextmanager
def signals_at(stage, *numbers):
    """Sends signals to this process when a run enters a stage, and notes the stages that follow."""
    later = []

    class Watchdog(trainer.Watchdog):
        def at(self, entered):
            super().at(entered)
            if entered == stage and not later:
                for number in numbers:
                    os.kill(os.getpid(), number)
            if later or entered == stage:
                later.append(entered)

    with mock.patch.object(trainer, "Watchdog", Watchdog):
        yield later
