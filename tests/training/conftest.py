"""Fixtures of the end-to-end tests."""

import pytest
from small_run import config_of, make_data, run


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A prepared data set with several documents to a window; its last held-out window is padded."""
    return make_data(tmp_path_factory.mktemp("corpus") / "data")


@pytest.fixture(scope="module")
def finished(compile_cache, data, tmp_path_factory):
    """An uninterrupted run of 12 steps on one device; tests must not change its folder."""
    return run(config_of(tmp_path_factory.mktemp("finished") / "run", data))
