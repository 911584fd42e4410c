"""How a run's functions are lowered for its mesh: the same for a run that starts and for one that is only compiled."""

import contextlib
import logging
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from orthros_jax.config import Config, ConfigError
from orthros_jax.sharding import batch_sharding, state_shardings
from orthros_jax.training.step import Program, TrainState


def abstract_state(program: Program, mesh: Mesh) -> TrainState:
    """Shapes, types and shardings of a training state on the mesh."""
    abstract = jax.eval_shape(lambda: program.init(jax.random.key(0)))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        abstract,
        state_shardings(abstract, mesh),
    )


def lower_train_step(program: Program, config: Config, mesh: Mesh, state: TrainState) -> jax.stages.Lowered:
    """The training step with its state donated; `state` may be abstract.

    Raises:
      ConfigError: the attention backend that the settings name cannot do it.
    """
    batch = _abstract_batch(config, mesh, config.training.batch_size)
    return _lower(jax.jit(program.train_step, donate_argnums=0), config, state, batch)


def lower_eval_step(program: Program, config: Config, mesh: Mesh, params, batch_size: int) -> jax.stages.Lowered:
    """The evaluation of one batch of `batch_size` windows; errors are those of `lower_train_step`."""
    return _lower(jax.jit(program.eval_step), config, params, _abstract_batch(config, mesh, batch_size))


@contextlib.contextmanager
def kernel_log_shown() -> Iterator[None]:
    """Shows which attention backend `auto` takes, and why not another: part of what a run is."""
    logger, handler = logging.getLogger("pallas_kernels"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("Kernel   %(message)s"))
    before = logger.level, logger.propagate
    if jax.process_index() == 0:
        logger.addHandler(handler)
        # A handler of the root logger, which libraries install, would print the line again.
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def _abstract_batch(config: Config, mesh: Mesh, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    size = (batch_size, config.data.sequence_length + 1)
    rows = jax.ShapeDtypeStruct(size, np.int32, sharding=batch_sharding(mesh))
    return {"tokens": rows, "segment_ids": rows}


def _lower(function, config: Config, *arguments) -> jax.stages.Lowered:
    try:
        return function.lower(*arguments)
    except NotImplementedError as error:
        if config.model.attention_impl == "auto":
            raise
        raise ConfigError("model.attention_impl", f"{error}; auto takes one that works") from error
