"""The words around a run: what it is at the start, what came out and what to do next at the end."""

import math
import re
import shlex

import jax

from orthros_jax.config import Config
from orthros_jax.model.flops import DEFINITION, sequence_flops
from orthros_jax.training.memory import GIB, ProgramMemory

_KIND_NAMES = {
    "orthros": "Orthros",
    "transformer": "Transformer",
    "sliding_window": "sliding-window Transformer",
}


def opening(
    config: Config,
    *,
    params,
    mesh,
    train,
    heldout,
    documents: float,
    start_step: int,
    restore_seconds: float | None,
) -> str:
    """Model, data, devices and length of the run, a line each.

    Args:
      params: the parameters.
      train, heldout: opened data sets.
      documents: mean number of documents in a window.
      start_step: steps made before this start.
      restore_seconds: time that reading their checkpoint took; None where there are none.
    """
    model, training = config.model, config.training
    size = sum(x.size for x in jax.tree.leaves(params))
    length = config.data.sequence_length
    axes = " x ".join(f"{name} {extent}" for name, extent in mesh.shape.items() if extent > 1) or "1"
    windows = sum(len(d) for d in train)
    window = "" if model.kind == "transformer" else f", window {model.window}"
    epochs = training.steps * training.batch_size / windows
    lines = [
        f"Model    {_KIND_NAMES[model.kind]}, {size:,} parameters, "
        f"{model.num_layers} layers of {model.model_dim}{window}",
        f"Data     {sum(d.tokens for d in train):,} training tokens, {sum(d.tokens for d in heldout):,} held out; "
        f"windows of {length}, {documents:.2f} documents in each",
        f"Devices  {axes} {mesh.devices.flat[0].device_kind}",
        f"Run      {config.run_dir}: {training.steps:,} steps of {training.batch_size} x {length} tokens "
        f"({epochs:.2g} epochs), {sequence_flops(model, length) / length:.3g} operations a token",
    ]
    schedule_steps = config.optimizer.schedule_steps
    if schedule_steps is not None and training.steps > schedule_steps and config.optimizer.schedule != "constant":
        final = config.optimizer.learning_rate * config.optimizer.final_ratio
        lines.append(
            f"Schedule ends at step {schedule_steps:,}, as at the run's first start; "
            f"beyond it the learning rate stays at {final:.3g}"
        )
    if start_step:
        lines += [f"Restored in {restore_seconds:.1f} s", f"Resuming at step {start_step:,}"]
    return "\n".join(lines)


def mfu_definition(peak_flops: float | None) -> str:
    """What MFU means here and the peak it refers to."""
    peak = "not known, so mfu is null; metrics.peak_tflops sets it"
    if peak_flops is not None:
        peak = f"{peak_flops / 1e12:.0f} TFLOP/s"
    return f"MFU      {DEFINITION}\n         peak of this device: {peak}"


def memory(program: ProgramMemory, device_bytes: int | None) -> str:
    """What a step holds on each device, against what the device has; None is not known."""
    capacity = "" if device_bytes is None else f" of {device_bytes / GIB:.2f}"
    return (
        f"Memory   {program.total / GIB:.2f}{capacity} GiB a device during a step: state and batch "
        f"{program.arguments / GIB:.2f}, temporaries {program.temporaries / GIB:.2f}"
    )


def goodput(share: float, steps: float, wall: float, saving: float) -> str:
    """Share of this start's time that went into steps; times in seconds."""
    return (
        f"Goodput  {share:.1%}: {steps:,.1f} s of steps in {wall:,.1f} s since the start; "
        f"{saving:,.1f} s waited in saves"
    )


def bits_per_byte(loss: float, bytes_per_token: float | None) -> float | None:
    """Nats per predicted token to bits per byte of text."""
    return None if not bytes_per_token else loss / math.log(2) / bytes_per_token


def closing(
    run_dir: str, command: str, *, steps: int, eval_loss: float | None, eval_bits_per_byte: float | None
) -> str:
    """Result, and the commands that lead on.

    Args:
      steps: steps made; more than this start asks for where an earlier one asked for more.
    """
    lines = [f"Complete: {steps:,} steps in {run_dir}."]
    if eval_loss is not None:
        bits = "" if eval_bits_per_byte is None else f", {eval_bits_per_byte:.3f} bits per byte"
        lines.append(f"Held-out loss {eval_loss:.4f} nats per token{bits}.")
    lines += [
        "Next:",
        f"  go on      {_without_steps(command)} --training.steps {2 * steps}",
        f"             (from step {steps:,}; the learning rate stays at its final value once its schedule has ended)",
        "  anew       give another --run_dir, with --training.steps for a longer schedule",
        f"  plot       python -m orthros_jax plot {shlex.quote(run_dir)}",
    ]
    return "\n".join(lines)


def _without_steps(command: str) -> str:
    return re.sub(r" --training\.steps[= ]\S+", "", command)
