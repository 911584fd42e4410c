"""Next-token cross-entropy that never holds the logits of a whole batch.

Logits are made, reduced and differentiated chunk by chunk of rows: the forward pass of a gradient computes the
gradients of rows and head along with the loss, so the backward pass only scales them and no logits are recomputed.
Losses travel as sums; whoever reports one divides by the sum of weights, once.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from orthros_jax.sharding import MESH_AXES, mesh_is_set, on_each_device, rows_spec
from orthros_jax.streams import Targets

# Enough rows to keep a matrix unit busy; with a vocabulary of 32,000 the chunk's float32 logits take 500 MiB.
_CHUNK_ROWS = 4096
# At least so many chunks, so that no chunk is a large share of the batch.
_MIN_CHUNKS = 8


class LossSums(NamedTuple):
    """Sums over output rows, float32 scalars.

    Attributes:
      objective: weighted cross-entropy plus the z-loss; the only differentiable one.
      cross_entropy: weighted cross-entropy in nats.
      weight: sum of the weights; divide by this.
    """

    objective: jax.Array
    cross_entropy: jax.Array
    weight: jax.Array


class _HeadAxes(NamedTuple):
    """Mesh axes that cut the head's width and its vocabulary; None where there is no mesh."""

    width: str | None
    vocabulary: str | None


def cross_entropy(
    hidden: jax.Array, head: jax.Array, targets: Targets, *, z_loss: float = 0.0, logits_dtype=jnp.float32
) -> LossSums:
    """Cross-entropy of softmax(hidden @ head) against the targets, with z_loss * logsumexp^2 added to the objective.

    Under a mesh each device takes its own batch rows and its own part of the vocabulary.

    Args:
      hidden: [B, P, D].
      head: [D, V], in any type; products are made in hidden's type.
      targets: labels and weights, [B, P].
      z_loss: weight of the squared log-normaliser (arXiv 2204.02311 section 5).
      logits_dtype: type of the logits and of their softmax.
    """
    axes = _HeadAxes("fsdp", "tensor") if mesh_is_set() else _HeadAxes(None, None)

    def local_sums(hidden, head, labels, weights):
        sums: Any = _chunked(hidden, head, labels, weights, z_loss, logits_dtype, axes)
        return tuple(total[None] for total in sums)

    # Every device returns its own part of both sums and the total is taken outside, so that the transposed map adds up
    # the partial gradients of whatever the devices share, the head over the batch and the rows over the vocabulary.
    everywhere = P(MESH_AXES)
    rows = rows_spec(hidden.shape[1])
    in_specs = (rows, P("fsdp", "tensor"), rows, rows)
    sums = on_each_device(local_sums, in_specs, (everywhere, everywhere))
    objective, entropy = sums(hidden, head, targets.labels, targets.weights)
    return LossSums(objective.sum(), entropy.sum(), targets.weights.sum())


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _chunked(hidden, head, labels, weights, z_loss, logits_dtype, axes):
    """(objective, cross-entropy) of one device's rows; each device of the vocabulary axis holds an equal share."""
    return _scan_chunks(hidden, head, labels, weights, z_loss, logits_dtype, axes, with_gradients=False)[0]


def _chunked_forward(hidden, head, labels, weights, z_loss, logits_dtype, axes):
    return _scan_chunks(hidden, head, labels, weights, z_loss, logits_dtype, axes, with_gradients=True)


def _chunked_backward(z_loss, logits_dtype, axes, gradients, cotangents):
    scale = cotangents[0]  # The cross-entropy is reported, not differentiated.
    d_hidden, d_head = gradients
    return d_hidden * scale.astype(d_hidden.dtype), d_head * scale.astype(d_head.dtype), None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


@jax.named_scope("loss_head")
def _scan_chunks(hidden, head, labels, weights, z_loss, logits_dtype, axes, *, with_gradients) -> Any:
    batch, rows, _ = hidden.shape
    head_dtype, head = head.dtype, head.astype(hidden.dtype)
    if axes.width is not None:
        head = jax.lax.all_gather(head, axes.width, axis=0, tiled=True)
    chunks = min(rows, max(_MIN_CHUNKS, -(-batch * rows // _CHUNK_ROWS)))
    chunk_rows = -(-rows // chunks)
    chunks = -(-rows // chunk_rows)

    def split(x):
        """[B, P, ...] to [chunks, B, P / chunks, ...]: cuts rows, not the batch, which devices share."""
        padding = [(0, 0), (0, chunks * chunk_rows - rows)] + [(0, 0)] * (x.ndim - 2)
        return jnp.moveaxis(jnp.pad(x, padding).reshape(batch, chunks, chunk_rows, *x.shape[2:]), 1, 0)

    def step(carry, chunk) -> Any:
        objective, entropy, d_head = carry
        h, label, weight = chunk
        logits = jnp.einsum("bpd,dv->bpv", h, head, preferred_element_type=logits_dtype)
        normaliser, label_logit, probability, is_label = _softmax(logits, label, axes.vocabulary)
        nll = normaliser - label_logit
        entropy += (weight * nll).sum()
        objective += (weight * (nll + z_loss * normaliser**2)).sum()
        if not with_gradients:
            return (objective, entropy, d_head), None
        through_normaliser = weight * (1 + 2 * z_loss * normaliser)
        d_logits = through_normaliser[..., None] * probability - jnp.where(is_label, weight[..., None], 0)
        d_logits = d_logits.astype(h.dtype)
        d_h = jnp.einsum("bpv,dv->bpd", d_logits, head, preferred_element_type=jnp.float32).astype(h.dtype)
        d_head += jnp.einsum("bpd,bpv->dv", h, d_logits, preferred_element_type=jnp.float32)
        return (objective, entropy, d_head), d_h

    zero = jnp.zeros((), jnp.float32)
    d_head: Any = jnp.zeros(head.shape, jnp.float32) if with_gradients else None
    carry, d_chunks = jax.lax.scan(step, (zero, zero, d_head), (split(hidden), split(labels), split(weights)))
    objective, entropy, d_head = carry
    if axes.vocabulary is not None:
        shares = jax.lax.axis_size(axes.vocabulary)
        objective, entropy = objective / shares, entropy / shares
    if not with_gradients:
        return (objective, entropy), None
    if axes.width is not None:
        d_head = jax.lax.psum_scatter(d_head, axes.width, scatter_dimension=0, tiled=True)
    d_hidden = jnp.moveaxis(d_chunks, 0, 1).reshape(batch, chunks * chunk_rows, -1)[:, :rows]
    return (objective, entropy), (d_hidden, d_head.astype(head_dtype))


def _softmax(logits, label, vocabulary_axis):
    """Log-normaliser and label logit over the whole vocabulary, and probabilities and label mask of this part of it."""
    local_vocabulary = logits.shape[-1]
    offset = 0 if vocabulary_axis is None else jax.lax.axis_index(vocabulary_axis) * local_vocabulary
    is_label = jnp.arange(local_vocabulary) == (label - offset)[..., None]
    peak = logits.max(axis=-1)
    if vocabulary_axis is not None:
        peak = jax.lax.pmax(peak, vocabulary_axis)
    exponential = jnp.exp(logits - peak[..., None])
    total = exponential.sum(axis=-1)
    label_logit = jnp.where(is_label, logits, 0).sum(axis=-1)
    if vocabulary_axis is not None:
        total, label_logit = jax.lax.psum((total, label_logit), vocabulary_axis)
    return jnp.log(total) + peak, label_logit, exponential / total[..., None], is_label
