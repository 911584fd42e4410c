"""Signals become a flag, in the process that runs the tests and in one that is really killed."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from orthros_jax.training.interrupt import StopSignal

NOTICE = "received: saving a checkpoint and stopping"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signal_sets_the_flag_and_old_handlers_return(name, capfd):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        assert not stop.requested
        assert stop.signal_name is None
        signal.raise_signal(signal.Signals[name])
        assert stop.requested
        assert stop.signal_name == name
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    hint = " (two more to quit at once without saving)" if name == "SIGINT" else ""
    assert capfd.readouterr().err == f"\n{name} {NOTICE}{hint}\n"


def test_repeated_signals_are_one_request(capfd):
    with StopSignal() as stop:
        for _ in range(5):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop.signal_name == "SIGTERM"
    assert capfd.readouterr().err.count(NOTICE) == 1


@pytest.fixture
def _interrupts_raise():
    """Python's own handler, which it leaves out where its parent ignores SIGINT, as a shell's background jobs do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts_raise")
def test_third_interrupt_acts_as_before():
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_return_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), StopSignal():
        _ = 1 / 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_the_main_thread_nothing_is_installed():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def run():
        with StopSignal() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGTERM) is before))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(False, True)]


def test_process_finishes_its_work_after_sigterm():
    program = """
import time
from orthros_jax.training.interrupt import StopSignal
with StopSignal() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("saved after", stop.signal_name)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "saved after SIGTERM\n", f"\nSIGTERM {NOTICE}\n")
