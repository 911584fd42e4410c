"""A run folder for the tests of `generate`."""

import pytest
from run_folder import make_run, random_params, small_config


@pytest.fixture(scope="session")
def params():
    """Parameters of steps 4 and 8; seeds of models whose likeliest tokens have no near ties in the tests."""
    return {4: random_params(small_config(), seed=2), 8: random_params(small_config(), seed=1)}


@pytest.fixture(scope="session")
def run_dir(params, tmp_path_factory):
    """A run with checkpoints of two steps; tests must not change it."""
    steps = {step: {"params": tree} for step, tree in params.items()}
    return make_run(tmp_path_factory.mktemp("inference") / "run", steps, small_config())
