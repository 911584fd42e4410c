"""The watchdog names the stage that hangs, once, and is silent otherwise."""

import threading
import time

import pytest

from orthros_jax.training.watchdog import Watchdog


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


@pytest.fixture
def report(tmp_path):
    with (tmp_path / "report").open("w+") as file:
        yield file


def text(file):
    file.flush()
    with open(file.name) as again:
        return again.read()


def stuck_in_the_loader(release):
    release.wait()


def test_names_the_stage_and_shows_all_stacks(report):
    release = threading.Event()
    thread = threading.Thread(target=stuck_in_the_loader, args=(release,), daemon=True)
    thread.start()
    with Watchdog(0.1, report) as watchdog:
        watchdog.at("waiting for data")
        wait_for(lambda: "stuck_in_the_loader" in text(report) and "wait_for" in text(report))
        time.sleep(0.4)
    release.set()
    thread.join()
    lines = text(report).splitlines()
    assert lines[0].startswith("watchdog: no progress for 0 s; the run hangs at: waiting for data.")
    assert text(report).count("watchdog:") == 1


def test_each_entered_stage_is_reported_once(report):
    with Watchdog(0.05, report) as watchdog:
        for stage in ("step 1", "step 2"):
            watchdog.at(stage)
            wait_for(lambda stage=stage: f"hangs at: {stage}." in text(report))
        watchdog.at("step 2")  # entered again: a new hang
        wait_for(lambda: text(report).count("hangs at: step 2.") == 2)
    assert text(report).count("watchdog:") == 3


def test_silent_while_there_is_progress(report):
    with Watchdog(0.5, report) as watchdog:
        for step in range(20):
            watchdog.at(f"step {step}")
            time.sleep(0.05)
    assert text(report) == ""


def test_compilation_is_worded_as_such(report):
    with Watchdog(0.05, report) as watchdog:
        watchdog.at("compiling")
        wait_for(lambda: "Stacks" in text(report))
    assert "watchdog: still compiling after 0 s; a large model can take several minutes." in text(report)
    assert "hangs" not in text(report)


def test_prints_to_standard_error_by_default(capfd):
    with Watchdog(0.05) as watchdog:
        watchdog.at("evaluation")
        time.sleep(0.5)
    assert "the run hangs at: evaluation. Stacks of all threads:\n" in capfd.readouterr().err


def test_close_ends_the_thread_at_once():
    watchdog = Watchdog(1000.0)
    start = time.monotonic()
    watchdog.close()
    watchdog.close()
    assert time.monotonic() - start < 1.0
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]
