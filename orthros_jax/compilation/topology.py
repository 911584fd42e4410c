"""Devices by name: `v5p:4x4x8`, `h200:8`, `h200:4x8`, as the compilers describe them without any being there."""

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from orthros_jax.errors import UserError
from orthros_jax.training.metrics import peak_flops_per_second

FORMS = "v5e:16x16, v5p:4x4x8, v6e:16x16 (chips along each axis), h200:8 (one host) or h200:4x8 (hosts x GPUs)"


@dataclass(frozen=True)
class Chip:
    """What one chip can do at best.

    Attributes:
      hbm_bytes: memory that a program may use.
      hbm_bandwidth: bytes per second between memory and chip.
      link_bandwidth: bytes per second that a chip sends to its neighbours along one axis of the torus, or to the GPUs
        of its host.
      network_bandwidth: the same to other hosts where that is another network, else None.
    """

    hbm_bytes: int
    hbm_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float | None = None


_GIB = 2**30
# Sources: the Cloud TPU system architecture pages (bandwidths; a ring along one axis uses both of its links), the TPU
# compiler's own limits (memory), NVIDIA's H200 data sheet (NVLink 900 GB/s in both directions, 141 GB less what the
# driver keeps) and a network card of 400 Gbit/s for each GPU.
_CHIPS = {
    "v5e": Chip(int(15.75 * _GIB), 819e9, 90e9),
    "v5p": Chip(int(95.74 * _GIB), 2765e9, 180e9),
    "v6e": Chip(int(31.25 * _GIB), 1640e9, 180e9),
    "h200": Chip(int(139.8 * _GIB), 4800e9, 450e9, 50e9),
}

# What XLA wants to know of an H200, in the text format of its GpuTargetConfigProto.
_H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 patch: 0 }
gpu_device_info {
  name: "NVIDIA H200" device_vendor: "NVIDIA Corporation" model_str: "sm_9.0a"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
  core_count: 132 fpus_per_core: 128 threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  device_memory_size: 151397597184 memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_address_bits: 64
}
"""


class Topology(NamedTuple):
    """Devices that need not be there.

    Attributes:
      name: as the user gave it.
      devices: jax.Device for compilation alone.
      chip: what each can do.
      peak_flops: dense bfloat16 peak of each in FLOP/s.
      devices_per_host: devices of one host's own interconnect; all of them where hosts do not matter to it.
    """

    name: str
    devices: list[Any]
    chip: Chip
    peak_flops: float
    devices_per_host: int


def open_topology(name: str) -> Topology:
    """The devices that `name` describes.

    Raises:
      UserError: no such name, no such machine, or the compiler for it is not installed.
    """
    match = re.fullmatch(r"(v5e|v5p|v6e|h200):(\d+(?:x\d+){0,2})", name)
    if match is None:
        raise UserError(f"--topology: {name!r} names no devices; write {FORMS}")
    kind, shape = match[1], [int(extent) for extent in match[2].split("x")]
    if not all(shape) or (kind == "h200" and len(shape) > 2):
        raise UserError(f"--topology: {name} is no machine; write {FORMS}")
    open_devices = _open_gpus if kind == "h200" else _open_tpus
    devices = open_devices(name, shape)
    peak = peak_flops_per_second(devices[0].device_kind)
    assert peak is not None
    per_host = shape[-1] if kind == "h200" else len(devices)
    return Topology(name, devices, _CHIPS[kind], peak, per_host)


def _open_tpus(name: str, shape: list[int]) -> list[Any]:
    _require("libtpu", f"pip install 'libtpu=={_libtpu_version()}.*'", name)
    # libtpu asks the cloud what machine this is, and locks it against a second process, unless told not to.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    try:
        devices = topologies.get_topology_desc(name, platform="tpu").devices
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"--topology: the TPU compiler knows no {name} ({_first_line(error)})") from error
    # Several devices on a chip would halve all figures; the kinds above have one.
    assert len(devices) == math.prod(shape)
    return devices


def _open_gpus(name: str, shape: list[int]) -> list[Any]:
    _require("jax_cuda13_plugin", "pip install -r requirements-kernels.txt", name)
    hosts, gpus = shape if len(shape) == 2 else (1, shape[0])
    # The first number counts groups of hosts that share an interconnect.
    return topologies.get_topology_desc(platform="cuda", target_config=_H200, topology=f"1x{hosts}x{gpus}").devices


def _require(package: str, install: str, name: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"compiling for {name} needs {package}; install it with: {install} (Python 3.12 or newer)")


def _libtpu_version() -> str:
    """The release that fits this JAX, as its extra `jax[tpu]` names it."""
    return {"0.10": "0.0.42", "0.11": "0.0.48"}[jax.__version__.rpartition(".")[0]]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
