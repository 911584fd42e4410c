"""Are the results of the benchmark's programs right? By the numerics rule of docs/kernels.md, at the shapes' own size.

The float64 reference is too slow there: the truth is blockwise XLA attention in float32 on the bfloat16 inputs, the
yardstick the same in bfloat16.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.candidates import Arrays, Program

OURS, PEERS = 2.0, 8.0
"""How many times the yardstick's error is allowed. Peers round where they like: they must only do the same task."""

_SLACK = 1e-5


class Reference(NamedTuple):
    truth: Arrays
    yardstick: Arrays


def in_float32(program: Program) -> Program:
    """The program on the inputs' values in float32."""

    def wide(inputs: Arrays) -> Arrays:
        return program({k: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for k, x in inputs.items()})

    return wide


def violations(found: Arrays, reference: Reference, factor: float) -> list[str]:
    """What breaks the rule: RMS or maximum error above `factor` times the yardstick's + 1e-5 of the largest value."""
    messages = []
    for name, array in found.items():
        truth, largest = reference.truth[name], float(jnp.abs(reference.truth[name]).max())
        errors, allowed = _errors(array, truth), _errors(reference.yardstick[name], truth)
        for label, error, yardstick in zip(("maximum", "RMS"), errors, allowed, strict=True):
            limit = factor * float(yardstick) + _SLACK * largest
            # Not "above the limit": a NaN is a violation too.
            if not float(error) <= limit:
                messages.append(f"{name}: {label} error {float(error):.3g} above {limit:.3g}")
    return messages


@jax.jit
def _errors(found: jax.Array, truth: jax.Array) -> tuple[jax.Array, jax.Array]:
    error = jnp.abs(found.astype(jnp.float32) - truth)
    return error.max(), jnp.sqrt(jnp.mean(error**2))
