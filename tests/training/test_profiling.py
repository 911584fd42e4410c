"""`training.profile_steps`: which steps a profile holds, and where it is."""

import re
import signal
from unittest import mock

import jax
import pytest
from small_run import config_of, copy_run, run
from stages import signals_at

from orthros_jax.config import ConfigError
from orthros_jax.training.profiling import StepProfile

pytestmark = pytest.mark.usefixtures("compile_cache")


def _steps_in(folder):
    """Numbers of the steps that a profile names; None where there is no profile."""
    files = list(folder.rglob("*.xplane.pb"))
    if not files:
        return None
    (file,) = files
    lines = [line for plane in jax.profiler.ProfileData.from_file(str(file)).planes for line in plane.lines]
    named = [dict(event.stats) for line in lines for event in line.events if event.name == "train"]
    return sorted({stats["step_num"] for stats in named})


def test_a_window_of_a_run(finished, data, tmp_path):
    profiled = run(config_of(tmp_path / "run", data, training__profile_steps=[6, 8]))
    assert profiled.code == 0
    folder = tmp_path / "run" / "profile"
    assert _steps_in(folder) == [6, 7, 8]
    assert len(list(folder.rglob("*.trace.json.gz"))) == 1
    assert profiled.out.count("Profile ") == 1
    assert f"Profile  of steps 6 to 8 in {folder}: open the .trace.json.gz there in https://ui.perf" in profiled.out
    assert profiled.steps == finished.steps


@pytest.mark.parametrize(("window", "recorded"), [([5, 8], None), ([6, 10], [9, 10])])
def test_a_run_that_goes_on_records_what_is_left(window, recorded, finished, data, tmp_path):
    copy_run(finished.run_dir, tmp_path / "run", last_checkpoint=8)
    again = run(config_of(tmp_path / "run", data, training__profile_steps=window))
    assert _steps_in(tmp_path / "run" / "profile") == recorded
    assert again.out.count("Profile ") == (recorded is not None)
    assert again.steps == finished.steps


def test_a_stop_inside_the_window(finished, data, tmp_path):
    config = config_of(tmp_path / "run", data, training__profile_steps=[6, 9])
    with signals_at("step 7", signal.SIGTERM):
        first = run(config)
    assert first.code == 0
    assert "Profile  of steps 6 to 7 in " in first.out
    assert _steps_in(tmp_path / "run" / "profile") == [6, 7]
    assert "Stopped by SIGTERM after step 7" in first.out


def test_each_of_several_processes_has_a_folder(tmp_path):
    with (
        mock.patch.object(jax, "process_count", return_value=2),
        mock.patch.object(jax, "process_index", return_value=1),
    ):
        profile = StepProfile([1, 1], tmp_path, print)
    profile.start()
    with profile.step(1):
        jax.block_until_ready(jax.numpy.ones(3) + 1)
    profile.close()
    assert _steps_in(tmp_path / "process-1") == [1]
    # The last step of a window comes again where it was skipped.
    assert not profile.starts_with(1)


@pytest.mark.parametrize("window", [[3], [0, 2], [3, 2], [1, 2, 3], []])
def test_no_window(window, data):
    problem = (
        rf"profile_steps: must be the first and the last step to profile, counted from 1, got {re.escape(str(window))}"
    )
    with pytest.raises(ConfigError, match=problem):
        config_of("run", data, training__profile_steps=window)


def test_a_window_beyond_the_run(data):
    with pytest.raises(ConfigError, match=r"profile_steps: \[11, 13\] goes beyond training.steps 12; profile earlier"):
        config_of("run", data, training__profile_steps=[11, 13])
