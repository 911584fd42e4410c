"""Every test sees eight CPU devices, so that sharding is exercised on any machine."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

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
