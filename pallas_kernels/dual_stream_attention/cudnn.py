"""Composition of two cuDNN calls on NVIDIA GPUs: one a stream, by `jax.nn.dot_product_attention`.

cuDNN has no switch for determinism: its backward pass may differ in the last bits from call to call
whatever `deterministic` says. It keeps its softmax statistics to itself: only the output carries a
checkpoint name, and a rematerialisation policy that saves it still runs the forward kernel again in the
backward pass.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.dispatch import why_not_nvidia_gpu
from pallas_kernels.dual_stream_attention.mask import Stream


def unsupported(
    streams: tuple[Stream, ...], k: jax.Array, segment_ids: jax.Array | None, deterministic: bool
) -> str | None:
    """Reason why cuDNN cannot do the call on the device that is compiled for, or None."""
    del deterministic
    head_size = k.shape[-1]
    no_gpu = why_not_nvidia_gpu(8.0)
    if no_gpu is not None:
        return no_gpu
    if k.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, and the inputs are {k.dtype}"
    if head_size % 8 or head_size > 128:
        return f"it needs a head size that is a multiple of 8 and at most 128, and it is {head_size}"
    if segment_ids is not None:
        return "packed segments need a bound on their number known at compile time, and segment_ids has none"
    if any(stream.out_index is not None for stream in streams):
        return "query rows must be the rows of the sequence, and out_index may name any"
    if any(stream.q.size >= 2**31 for stream in streams):
        return "its gradients are wrong for 2**31 or more query elements"
    return None


def attention(
    streams: tuple[Stream, ...], k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, scale: float
) -> tuple[jax.Array, ...]:
    """Output [B, T, N, H] of each stream over k, v [B, T, K, H]."""
    del segment_ids
    # Each stream's call returns rounded dk and dv: the casts make their sum over the streams a float32 one.
    wide_k, wide_v = k.astype(jnp.float32), v.astype(jnp.float32)
    outputs = []
    for stream in streams:
        window = None if stream.window is None or stream.window >= k.shape[1] else stream.window
        out = jax.nn.dot_product_attention(
            _even_rows(stream.q),
            _even_rows(wide_k.astype(k.dtype)),
            _even_rows(wide_v.astype(v.dtype)),
            scale=scale,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
        outputs.append(checkpoint_name(out[:, : k.shape[1]], "attention_output"))
    return tuple(outputs)


def _even_rows(x: jax.Array) -> jax.Array:
    """Appends a row where their number is odd, which cuDNN's training kernels refuse; no earlier row sees it."""
    return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))
