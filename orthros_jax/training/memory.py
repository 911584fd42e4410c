"""Memory of a compiled program and of the devices, in bytes."""

from typing import NamedTuple

import jax

GIB = 2**30


class ProgramMemory(NamedTuple):
    """What one device holds while it runs a program, in bytes.

    Attributes:
      arguments: what the program is given.
      temporaries: what it makes and gives up.
      total: both with the results and the code; results that take the place of arguments count once.
    """

    arguments: int
    temporaries: int
    total: int


def program_memory(compiled: jax.stages.Compiled) -> ProgramMemory | None:
    """None where the backend does not tell."""
    m = compiled.memory_analysis()
    if m is None:
        return None
    arrays = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    total = arrays + m.generated_code_size_in_bytes
    return ProgramMemory(m.argument_size_in_bytes, m.temp_size_in_bytes, total)


def device_bytes(device) -> int | None:
    """What a device of `jax.devices()` has for programs; None where it does not tell, as a CPU."""
    return (device.memory_stats() or {}).get("bytes_limit")


def peak_device_bytes() -> int | None:
    """The most that any device of this process has held so far; None where none tells."""
    found = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((peak for peak in found if peak is not None), default=None)
