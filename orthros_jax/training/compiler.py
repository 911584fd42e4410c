"""What a run asks of XLA: the only place for its options, each with the reason."""

import os

from jax.sharding import Mesh

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
