"""What a run asks of XLA: the only place for its options, each with the reason."""

import os
from pathlib import Path

import jax
from jax.sharding import Mesh

from orthros_jax.training.folders import check_folder, make_folder

# By platform of the mesh's devices.
_OPTIONS: dict[str, dict[str, str | bool]] = {
    "gpu": {
        # cuBLAS alone: Triton's products, which the autotuner takes where it finds them faster one by one, slow the
        # step down as a whole, and trying them is most of the time that compiling takes.
        "xla_gpu_enable_triton_gemm": False,
    },
}


def compiler_options(mesh: Mesh) -> dict[str, str | bool]:
    """Options for `jax.stages.Lowered.compile` on the mesh's devices."""
    platform = mesh.devices.flat[0].platform
    return dict(_OPTIONS.get("gpu" if platform == "cuda" else platform, {}))


def use_device_memory() -> None:
    """Lets JAX use most of a GPU's memory, unless the environment says otherwise; call it before JAX starts.

    JAX's own default is three quarters of it, which leaves 35 GB of an H200 idle.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")


def use_compile_cache(folder: str | None) -> None:
    """Keeps compiled programs in `folder`, small ones too, and takes them from there; call it before JAX compiles.

    None leaves the folder to JAX, which takes that of the environment variable JAX_COMPILATION_CACHE_DIR.

    Raises:
      ConfigError: it is not a folder to write in.
    """
    if folder is not None:
        check_folder("training.compile_cache", Path(folder))
        make_folder("training.compile_cache", Path(folder))
        jax.config.update("jax_compilation_cache_dir", folder)
    # JAX leaves out what compiles within a second, which a start has many of.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
