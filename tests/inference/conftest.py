"""A run folder for the tests of `generate`."""

import jax
import pytest
from run_folder import make_run, random_params, small_config


@pytest.fixture(scope="session")
def params():
    """Parameters of steps 4 and 8."""
    return {step: jax.device_get(random_params(small_config(), step)) for step in (4, 8)}


@pytest.fixture(scope="session")
def run_dir(params, tmp_path_factory):
    """A run with checkpoints of two steps; tests must not change it."""
    steps = {step: {"params": jax.tree.map(jax.numpy.asarray, tree)} for step, tree in params.items()}
    return make_run(tmp_path_factory.mktemp("inference") / "run", steps, small_config())
