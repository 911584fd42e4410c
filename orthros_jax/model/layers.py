"""Parts of a layer that act on each row by itself. Shapes: [..., D] in, [..., D] out, any leading axes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from orthros_jax.config import ModelConfig
from orthros_jax.model.float8 import float8_matmul
from orthros_jax.sharding import mesh_is_set, on_each_device, rows_spec


class Linear(nnx.Module):
    """x @ kernel without bias, over one or more input axes and output axes.

    Args:
      in_axes, out_axes: sizes of the contracted and of the resulting axes; the kernel is [*in_axes, *out_axes].
    """

    def __init__(self, in_axes: tuple[int, ...], out_axes: tuple[int, ...], config: ModelConfig, rngs: nnx.Rngs):
        kernel = config.init_std * jax.random.normal(rngs.params(), in_axes + out_axes)
        self.kernel = nnx.Param(kernel.astype(config.param_dtype))
        self.num_in_axes = len(in_axes)
        self.dtype = jnp.dtype(config.compute_dtype)
        self.float8 = config.float8

    def __call__(self, x: jax.Array) -> jax.Array:
        x, kernel = x.astype(self.dtype), self.kernel[...].astype(self.dtype)
        if not self.float8:
            return _project(x, kernel, self.num_in_axes)
        rows, matrix = _as_matrices(x, kernel, self.num_in_axes)
        return _from_matrix(float8_matmul(rows, matrix), x, kernel, self.num_in_axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _project(x: jax.Array, kernel: jax.Array, num_in_axes: int) -> jax.Array:
    return _project_forward(x, kernel, num_in_axes)[0]


def _project_forward(x, kernel, num_in_axes):
    # Not _project itself: a policy that saves products does not look into a call with its own derivative.
    rows, matrix = _as_matrices(x, kernel, num_in_axes)
    return _from_matrix(rows @ matrix, x, kernel, num_in_axes), (x, kernel)


def _project_backward(num_in_axes, residuals, gradient):
    # Without the barrier XLA's CPU compiler recomputes the element-wise operations around a projection inside the
    # transposing copy that the weight's gradient needs: twice the time of a feed-forward layer.
    x, gradient = jax.lax.optimization_barrier((residuals[0], gradient))
    kernel = residuals[1]
    rows, matrix = _as_matrices(x, kernel, num_in_axes)
    gradient = gradient.reshape(len(rows), -1)
    return (gradient @ matrix.T).reshape(x.shape), (rows.T @ gradient).reshape(kernel.shape)


def _as_matrices(x: jax.Array, kernel: jax.Array, num_in_axes: int) -> tuple[jax.Array, jax.Array]:
    """x as [rows, in] and kernel as [in, out]: of more axes XLA would choose layouts that cost transposing copies."""
    matrix = kernel.reshape(math.prod(kernel.shape[:num_in_axes]), -1)
    return x.reshape(-1, matrix.shape[0]), matrix


def _from_matrix(y: jax.Array, x: jax.Array, kernel: jax.Array, num_in_axes: int) -> jax.Array:
    return y.reshape(*x.shape[: x.ndim - num_in_axes], *kernel.shape[num_in_axes:])


_project.defvjp(_project_forward, _project_backward)


def keeps_inputs(function):
    """An element-wise function of arrays whose backward pass keeps its inputs alone and makes the rest again.

    Left to itself, differentiation keeps several float32 intermediates of every row.
    """
    named = jax.named_scope(function.__name__)(function)
    return jax.checkpoint(named, policy=jax.checkpoint_policies.nothing_saveable)


class Embedding(nnx.Module):
    """Token ids [...] to vectors [..., D] in the compute type."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        kernel = config.init_std * jax.random.normal(rngs.params(), (config.vocab_size, config.model_dim))
        self.kernel = nnx.Param(kernel.astype(config.param_dtype))
        self.dtype = jnp.dtype(config.compute_dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        lookup = functools.partial(_lookup, dtype=self.dtype, is_cut=mesh_is_set())
        rows = rows_spec(*tokens.shape[1:])
        return on_each_device(lookup, (P("tensor", "fsdp"), rows), rows)(self.kernel[...], tokens)


def _lookup(table: jax.Array, tokens: jax.Array, *, dtype, is_cut: bool) -> jax.Array:
    """Rows of the table. Of one that is cut by vocabulary and width, devices exchange rows: far less than the table.

    Looked up before it is rounded: the gradient then adds a token's occurrences in the parameter's type, where a sum
    in bfloat16 stops growing after some 256 of them.
    """
    if not is_cut:
        return table[tokens].astype(dtype)
    tokens = jax.lax.all_gather(tokens, "fsdp", axis=0, tiled=True)
    tokens -= jax.lax.axis_index("tensor") * table.shape[0]
    is_here = (tokens >= 0) & (tokens < table.shape[0])
    rows = jnp.where(is_here[..., None], table[jnp.where(is_here, tokens, 0)], 0).astype(dtype)
    rows = jax.lax.psum(rows, "tensor")
    return jax.lax.all_to_all(rows, "fsdp", split_axis=0, concat_axis=rows.ndim - 1, tiled=True)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis (arXiv 1910.07467)."""

    def __init__(self, size: int, config: ModelConfig):
        self.scale = nnx.Param(jnp.ones(size, config.param_dtype))
        self.eps = config.norm_eps
        self.dtype = jnp.dtype(config.statistics_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        @keeps_inputs
        def normalise(x, scale):
            y = x.astype(self.dtype)
            y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
            return (y * scale.astype(self.dtype)).astype(x.dtype)

        return normalise(x, self.scale[...])


class ScaleOffset(nnx.Module):
    """gamma * q + beta, element-wise over [N, H]: what one stream makes of the shared query; identity at first."""

    def __init__(self, config: ModelConfig):
        shape = (config.num_heads, config.head_dim)
        self.dtype = jnp.dtype(config.statistics_dtype)
        self.gamma = nnx.Param(jnp.ones(shape, config.param_dtype))
        self.beta = nnx.Param(jnp.zeros(shape, config.param_dtype))

    def __call__(self, q: jax.Array) -> jax.Array:
        @keeps_inputs
        def specialise(q, gamma, beta):
            # In bfloat16 a gamma of 1 would not notice changes below 0.4 %.
            specialised = q.astype(self.dtype) * gamma.astype(self.dtype) + beta.astype(self.dtype)
            return specialised.astype(q.dtype)

        # As matrix and vectors: for the sums over [B, T, N, H] that gamma's gradient takes, XLA would transpose q.
        gamma, beta = self.gamma[...].ravel(), self.beta[...].ravel()
        return specialise(q.reshape(-1, gamma.size), gamma, beta).reshape(q.shape)


class SwiGLU(nnx.Module):
    """(silu(x gate) * (x up)) down (arXiv 2002.05202 equation 6)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.gate = Linear((config.model_dim,), (config.ffn_dim,), config, rngs)
        self.up = Linear((config.model_dim,), (config.ffn_dim,), config, rngs)
        self.down = Linear((config.ffn_dim,), (config.model_dim,), config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @keeps_inputs
        def gated(gate, up):
            return jax.nn.silu(gate) * up

        return self.down(gated(self.gate(x), self.up(x)))


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position of each pair of channels, [H / 2] float32 (arXiv 2104.09864 equation 15).

    Formed in float64 on the host, so that they are correctly rounded and the same on every device: at position 131071
    an error of one part in a million would turn a pair by 0.1 rad.

    With `rope_scaling: llama3`, channels whose wavelength is above original_length / low_frequency_factor turn slower
    by `rope_factor`, those below original_length / high_frequency_factor are left, and the rest blends linearly in the
    reciprocal wavelength (Llama 3.1).
    """
    frequency = config.rope_base ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    if config.rope_scaling == "none":
        return frequency.astype(np.float32)
    low, high = config.rope_low_frequency_factor, config.rope_high_frequency_factor
    turns = config.rope_original_length * frequency / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (frequency * (keep + (1 - keep) / config.rope_factor)).astype(np.float32)


def rope_table(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every row's angles, each [B, T, H / 2] float32.

    Angles are formed in float32 whatever the compute type: in bfloat16 a position above 256 is not even exact.
    """
    angle = positions[..., None].astype(jnp.float32) * rope_frequencies(config)
    return jnp.cos(angle), jnp.sin(angle)


@keeps_inputs
def apply_rope(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates channel pairs (i, i + H / 2) of x [B, T, N, H]; the result is rounded to x's type once."""
    cos, sin = (t[:, :, None, None, :] for t in table)
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    # Reversing the axis of halves costs a kernel nothing, where cutting and joining them would take copies.
    other = jax.lax.rev(halves, (halves.ndim - 2,)) * jnp.array([[-1.0], [1.0]], jnp.float32)
    return (halves * cos + other * sin).reshape(x.shape).astype(x.dtype)
