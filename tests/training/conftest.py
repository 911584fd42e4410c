"""Fixtures of the end-to-end tests."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from small_run import config_of, make_data, run

_FAST = {
    "jax_disable_most_optimizations": True,
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compile_cache(cache_dir):
    """Compiling is most of what a small run does: each program is compiled once, in a hurry."""
    before = {name: jax.config.values[name] for name in ("jax_compilation_cache_dir", *_FAST)}
    for name, value in {"jax_compilation_cache_dir": str(cache_dir), **_FAST}.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A prepared data set with several documents to a window; its last held-out window is padded."""
    return make_data(tmp_path_factory.mktemp("corpus") / "data")


@pytest.fixture(scope="module")
def finished(compile_cache, data, tmp_path_factory):
    """An uninterrupted run of 12 steps on one device; tests must not change its folder."""
    return run(config_of(tmp_path_factory.mktemp("finished") / "run", data))
