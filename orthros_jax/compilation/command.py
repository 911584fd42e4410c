"""python -m orthros_jax compile: does a run fit a machine, what does it move, how long will it take?"""

import collections
import math
import re
import time
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from orthros_jax.compilation.estimate import Roofline, roofline, step_flops
from orthros_jax.compilation.hlo import Collective, Program
from orthros_jax.compilation.topology import FORMS, Topology, open_topology
from orthros_jax.config import Config, ConfigError
from orthros_jax.config_reader import locate, read_config
from orthros_jax.errors import UserError
from orthros_jax.sharding import build_mesh, check_divisible
from orthros_jax.training.lowering import abstract_state, kernel_log_shown, lower_train_step
from orthros_jax.training.memory import GIB, program_memory
from orthros_jax.training.step import TrainState, make_program
from pallas_kernels.dispatch import compiling_for

USAGE = f"""usage: python -m orthros_jax compile --topology NAME --config FILE [--section.key value ...]

Compiles the training step of a run for devices that this machine need not have, and reports memory, collectives and a
roofline. Exit code 2 where the step does not fit.

  --topology NAME  {FORMS}
  other arguments  those of train.py"""

_LARGEST = 8


def main(argv: list[str]) -> int:
    if not argv or "-h" in argv or "--help" in argv:
        print(USAGE)
        return 0 if argv else 2
    name, settings = _split_topology(argv)
    # Nothing is computed here, and an accelerator that is here belongs to others.
    jax.config.update("jax_platforms", "cpu")
    config = read_config(settings, prog="python -m orthros_jax compile")
    try:
        with kernel_log_shown():
            print(compile_run(config, open_topology(name)).text())
    except ConfigError as error:
        raise locate(error, settings) from None
    return 0


class Report(NamedTuple):
    """What the compiler made of a run.

    Attributes:
      memory_bytes: of one device: state, batch and everything temporary.
      seconds: that the compiler took.
    """

    config: Config
    topology: Topology
    mesh: Mesh
    parameters: int
    memory_bytes: int
    state_bytes: int
    collectives: list[Collective]
    roofline: Roofline
    seconds: float

    def text(self) -> str:
        config, chip = self.config, self.topology.chip
        axes = " x ".join(f"{axis} {extent}" for axis, extent in self.mesh.shape.items() if extent > 1) or "1"
        tokens = config.training.batch_size * config.data.sequence_length
        flops = step_flops(config)
        fast, slow = self.roofline.overlapped, self.roofline.serial
        lines = [
            f"Devices      {self.mesh.size} {self.topology.devices[0].device_kind}, {axes}",
            f"Model        {self.parameters:,} parameters; {tokens:,} tokens a step in micro-batches of "
            f"{config.training.batch_size // config.training.accumulation} windows",
            f"Compiled     in {self.seconds:.0f} s",
            f"Memory       {self.memory_bytes / GIB:.2f} of {chip.hbm_bytes / GIB:.2f} GiB a chip, of which "
            f"{self.state_bytes / GIB:.2f} training state",
            "Collectives  of one step on each device, by the axes that their groups span",
            *(f"  {line}" for line in _collective_table(self.collectives)),
            f"FLOPs        {flops:.3g} a step, {flops / tokens:.3g} a token (documents as long as windows, without "
            "recomputation)",
            f"Roofline     compute {_seconds(self.roofline.compute)}, state traffic {_seconds(self.roofline.memory)}, "
            f"network {_seconds(self.roofline.network)}",
            f"  step       {_seconds(fast)} where all overlap, {_seconds(slow)} where nothing does",
            f"  tokens/s   {tokens / fast:,.0f} to {tokens / slow:,.0f}; "
            f"{tokens / fast / self.mesh.size:,.0f} to {tokens / slow / self.mesh.size:,.0f} a chip",
            f"  run        {config.training.steps:,} steps, {tokens * config.training.steps / 1e9:.1f}B tokens: "
            f"{_days(fast, config)} to {_days(slow, config)} days",
        ]
        return "\n".join(lines)


def compile_run(config: Config, topology: Topology) -> Report:
    """Compiles the training step as the trainer does and reads its program.

    Raises:
      ConfigError: the mesh does not fit the devices, or the batch and model not the mesh.
      UserError: the step does not fit the devices' memory, or moves whole weights where it should move parts.
    """
    mesh = build_mesh(config.mesh, topology.devices)
    check_divisible(config, mesh)
    program = make_program(config, config.optimizer.schedule_steps or config.training.steps)
    started = time.perf_counter()
    with jax.set_mesh(mesh), compiling_for(topology.devices[0]):
        state = abstract_state(program, mesh)
        lowered = lower_train_step(program, config, mesh, state)
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            raise _does_not_fit(error, topology) from error
    seconds = time.perf_counter() - started
    parsed = Program(compiled.as_text() or "", mesh)
    found = program_memory(compiled)
    assert found is not None
    memory = found.total
    if memory > topology.chip.hbm_bytes:
        largest = [f"{a.nbytes / GIB:8.2f} GiB  {a}  {source}" for a, source in parsed.largest_arrays(_LARGEST)]
        raise UserError(_too_large(topology, f"{memory / GIB:.2f} GiB", largest))
    collectives = parsed.collectives()
    _refuse_whole_weights(collectives, state, mesh)
    state_bytes = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
    return Report(
        config,
        topology,
        mesh,
        sum(x.size for x in jax.tree.leaves(state.params)),
        memory,
        state_bytes,
        collectives,
        roofline(config, topology, mesh, collectives, state_bytes),
        seconds,
    )


def _split_topology(argv: list[str]) -> tuple[str, list[str]]:
    rest, names = list(argv), []
    while (at := next((i for i, a in enumerate(rest) if a.partition("=")[0] == "--topology"), None)) is not None:
        argument = rest.pop(at)
        if "=" in argument:
            names.append(argument.partition("=")[2])
        elif at < len(rest):
            names.append(rest.pop(at))
    if len(names) != 1:
        raise UserError(f"--topology NAME must be given once; write {FORMS}")
    return names[0], rest


def _does_not_fit(error: Exception, topology: Topology) -> Exception:
    """What the TPU compiler says of too large a program, in our words; any other failure as it is."""
    text = str(error)
    used = re.search(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm", text)
    if "RESOURCE_EXHAUSTED" not in text or used is None:
        return error
    sizes = re.findall(r"Size: ([\d.]+[KMGT])\n(?:.*\n)*?\s+Operator: op_(?:type|name)=\"?([^\n\"]*)", text)
    shapes = re.findall(r"\n\s+Shape: ([^\n{]+)", text)
    largest = [f"{size:>8}iB  {shape}  {source}" for (size, source), shape in zip(sizes, shapes, strict=False)]
    return UserError(_too_large(topology, f"{used[1]}iB", largest[:_LARGEST]))


def _too_large(topology: Topology, needed: str, largest: list[str]) -> str:
    return "\n".join(
        [
            f"the step needs {needed} of memory on each {topology.name.partition(':')[0]} chip, which has "
            f"{topology.chip.hbm_bytes / GIB:.2f} GiB; raise mesh.fsdp or training.accumulation, or set model.remat "
            "to full. The largest arrays:",
            *(f"  {line}" for line in largest),
        ]
    )


def _refuse_whole_weights(collectives: list[Collective], state: TrainState, mesh: Mesh) -> None:
    """Parameters that FSDP cuts must be gathered and their gradients scattered; an all-reduce moves several times that.

    Raises:
      UserError: an all-reduce over fsdp has the size of a whole weight.
    """
    parts = mesh.shape["fsdp"]
    whole = set()
    for name, parameters in state.params.items():
        for leaf in jax.tree.leaves(parameters):
            size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * parts
            if parts > 1 and size <= leaf.size:
                # The compiler may move a stack of layers as one.
                whole |= {size, size // leaf.shape[0]} if name == "layers" else {size}
    for c in collectives:
        if c.kind == "all-reduce" and "fsdp" in c.axes and (wrong := [a for a in c.arrays if a.size in whole]):
            raise UserError(
                f"FSDP became an all-reduce of whole weights: {', '.join(map(str, wrong))} over "
                f"{' and '.join(c.axes)}, {c.count} times a step ({c.source}). Compilers do this where mesh.fsdp spans "
                "a whole slice; choose a smaller mesh.fsdp and leave the rest to mesh.data"
            )


def _collective_table(collectives: list[Collective]) -> list[str]:
    totals = collections.defaultdict(lambda: np.zeros(3))
    for c in collectives:
        totals[c.kind, " x ".join(c.axes)] += (c.count, c.nbytes, c.sent_bytes)
    if not totals:
        return ["none"]
    return [
        f"{kind:<18} {axes:<16} {count:7,.0f} times {nbytes / 1e9:9.3f} GB, {sent / 1e9:9.3f} GB sent"
        for (kind, axes), (count, nbytes, sent) in sorted(totals.items(), key=lambda item: -item[1][2])
    ]


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _days(step: float, config: Config) -> str:
    return f"{step * config.training.steps / 86400:.3g}"
