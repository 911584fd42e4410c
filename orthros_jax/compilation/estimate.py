"""What a step costs at the least: operations, memory traffic and network traffic against what a chip can do."""

from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from orthros_jax.compilation.hlo import Collective
from orthros_jax.compilation.topology import Topology
from orthros_jax.config import Config
from orthros_jax.model.flops import sequence_flops


class Roofline(NamedTuple):
    """Seconds of one step that each resource needs at its peak, were it alone.

    Attributes:
      compute: model operations and those that remat repeats.
      memory: the training state read and written once.
      network: bytes of the collectives over the slowest network that their groups cross.
    """

    compute: float
    memory: float
    network: float

    @property
    def overlapped(self) -> float:
        """All three at once: no step is faster."""
        return max(self)

    @property
    def serial(self) -> float:
        """One after the other: nothing overlaps."""
        return sum(self)


# Under other policies of rematerialisation the backward pass repeats the forward pass.
_WITHOUT_REPETITION = ("none", "save_dots")


def step_flops(config: Config) -> float:
    """Model operations of one step on all devices, its windows taken as one document each."""
    return config.training.batch_size * sequence_flops(config.model, config.data.sequence_length)


def roofline(
    config: Config, topology: Topology, mesh: Mesh, collectives: Sequence[Collective], state_bytes: int
) -> Roofline:
    """Estimates one step.

    Args:
      state_bytes: of the training state on one device.
    """
    chip = topology.chip
    passes = 3 if config.model.remat in _WITHOUT_REPETITION else 4
    flops = step_flops(config) * passes / 3 / mesh.size
    # A chip without a network of its own has all devices within one "host".
    between_hosts = chip.network_bandwidth or chip.link_bandwidth
    network = sum(
        c.sent_bytes / (chip.link_bandwidth if _within_host(c, topology, mesh) else between_hosts) for c in collectives
    )
    return Roofline(flops / topology.peak_flops, 2 * state_bytes / chip.hbm_bandwidth, network)


def _within_host(collective: Collective, topology: Topology, mesh: Mesh) -> bool:
    """Whether each group lies in one host, or hosts make no difference. Devices of the last axes are neighbours."""
    if topology.chip.network_bandwidth is None:
        return True
    span = 1
    for axis, extent in reversed(mesh.shape.items()):
        if axis in collective.axes:
            reach = span * extent
            if reach > topology.devices_per_host:
                return False
        span *= extent
    return True
