"""How a run's functions are compiled: the only place for options of the compiler, each with its reason."""

import os

import jax
import numpy as np
from jax.sharding import Mesh

from orthros_jax.config import Config
from orthros_jax.sharding import batch_sharding

# By platform of the mesh's devices.
_OPTIONS = {
    "gpu": {
        # cuBLAS alone makes the large products of a training step faster than Triton's tiles do, also where the
        # autotuner, which times a product by itself, finds otherwise; and compiling takes a fraction of the time.
        "xla_gpu_enable_triton_gemm": False,
    },
}


def compiler_options(mesh: Mesh) -> dict[str, bool | int | str]:
    """Options for `jax.stages.Lowered.compile` on the mesh's devices."""
    platform = mesh.devices.flat[0].platform
    return dict(_OPTIONS.get("gpu" if platform == "cuda" else platform, {}))


def compile_for_batches(function, state, config: Config, batch_size: int, mesh: Mesh) -> jax.stages.Compiled:
    """Compiles (state, batch) -> ... for batches of `batch_size` windows; call it with the mesh set.

    Args:
      function: a jitted function.
      state: arrays or ShapeDtypeStructs with their shardings.

    Raises:
      NotImplementedError: `model.attention_impl` names a backend that cannot do it.
    """
    shape = (batch_size, config.data.sequence_length + 1)
    rows = jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding(mesh))
    lowered = function.lower(state, {"tokens": rows, "segment_ids": rows})
    return lowered.compile(compiler_options(mesh))


def use_device_memory() -> None:
    """Lets JAX use most of a GPU's memory, unless the environment says otherwise; call it before JAX starts.

    JAX's own default is three quarters of it, which leaves 35 GB of an H200 idle.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
