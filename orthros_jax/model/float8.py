"""Matrix products in float8 with scales of the tensor at hand, so that a run carries no scaling state.

Operands are rounded to e4m3 in the forward pass, gradients to e5m2 (arXiv 2209.05433), each by one scale that puts its
largest value at the end of the type's range. Rounding and scales are Flax's; XLA makes float8 products of cuBLAS out of
a product of two such operands, and rounds to float8 and multiplies in the wide type where the device has none.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops


class Rounded(NamedTuple):
    """A float8 array and the float32 scalar that its values are to be multiplied by."""

    values: jax.Array
    scale: jax.Array


def rounded(x: jax.Array, dtype) -> Rounded:
    """x in a float8 type; an array of zeros or with a value that is not finite keeps the scale 1."""
    largest = jnp.abs(x).max().astype(jnp.float32)
    scale = fp8_ops.compute_scale(largest, jnp.float32(1), fp8_ops.get_fp8_max(dtype, jnp.float32))
    return Rounded(fp8_ops.quantize(x, dtype, scale, jnp.float32), scale)


@jax.custom_vjp
def float8_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [rows, in] @ kernel [in, out], both rounded to float8; also in the products of the backward pass."""
    return _forward(x, kernel)[0]


def _forward(x, kernel):
    x8, kernel8 = rounded(x, jnp.float8_e4m3fn), rounded(kernel, jnp.float8_e4m3fn)
    # An empty array tells the backward pass the type.
    return _wide(x8, x.dtype) @ _wide(kernel8, x.dtype), (x8, kernel8, jnp.zeros(0, x.dtype))


def _backward(residuals, gradient):
    x8, kernel8, like = residuals
    gradient8 = rounded(gradient, jnp.float8_e5m2)
    gradient, x, kernel = (_wide(t, like.dtype) for t in (gradient8, x8, kernel8))
    return gradient @ kernel.T, x.T @ gradient


float8_matmul.defvjp(_forward, _backward)


def _wide(rounded: Rounded, dtype) -> jax.Array:
    return fp8_ops.dequantize(rounded.values, dtype, rounded.scale)
