"""`training.compile_cache`: a second start compiles nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import pytest
from small_run import config_of

from orthros_jax.config import ConfigError
from orthros_jax.config_reader import save_config
from orthros_jax.training.compiler import use_compile_cache

ROOT = Path(__file__).parents[2]
# A run in a process of its own, which says how many programs it asked the cache for and how many it did not find.
_COUNTED = """
import collections, json, sys
import jax
sys.path.insert(0, sys.argv.pop(1))
import train
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: counts.update([name.rpartition("/")[2]]))
code = train.main(sys.argv[1:])
print("\\n" + json.dumps({"code": code, **counts}))
"""


def _start(config_file, *settings):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-c", _COUNTED, str(ROOT), "--config", str(config_file), *settings]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_start_compiles_nothing(data, tmp_path):
    changes = {"training__steps": 2, "training__accumulation": 1, "model__num_layers": 1}
    config = config_of(tmp_path / "run", data, training__compile_cache=str(tmp_path / "compiled"), **changes)
    save_config(config, tmp_path / "run.yaml")
    first = _start(tmp_path / "run.yaml")
    assert first["code"] == 0
    assert first["cache_misses"] > 0
    again = _start(tmp_path / "run.yaml", "--run_dir", str(tmp_path / "again"))
    assert again["code"] == 0
    assert again.get("cache_misses", 0) == 0
    assert again["cache_hits"] == again["compile_requests_use_cache"] > 0


@pytest.mark.parametrize("inside", ["", "deeper"])
def test_a_file_in_its_place(inside, tmp_path):
    (tmp_path / "file").write_text("kept")
    before = jax.config.values["jax_compilation_cache_dir"]
    with pytest.raises(ConfigError, match=r"^training.compile_cache: .*/file is a file; name a folder$"):
        use_compile_cache(str(tmp_path / "file" / inside))
    assert jax.config.values["jax_compilation_cache_dir"] == before


def test_a_folder_that_cannot_be_written(tmp_path):
    # The superuser may write anywhere.
    with (
        mock.patch.object(os, "access", lambda path, mode: Path(path) != tmp_path),
        pytest.raises(ConfigError, match=r"^training.compile_cache: .* cannot be written; name another folder$"),
    ):
        use_compile_cache(str(tmp_path / "compiled"))


def test_a_folder_without_a_name(data):
    with pytest.raises(ConfigError, match=r"training.compile_cache: must name a folder, or be null"):
        config_of("run", data, training__compile_cache="")
