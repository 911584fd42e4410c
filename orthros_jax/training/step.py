"""The training state and the two pure functions on it: one optimizer step, one evaluation batch."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from orthros_jax import streams
from orthros_jax.config import Config
from orthros_jax.loss import LossSums, cross_entropy
from orthros_jax.model import build_model
from orthros_jax.model.flops import visible_pairs
from orthros_jax.training.optimizer import make_optimizer, update_ema
from orthros_jax.training.schedule import learning_rate_schedule

Batch = dict[str, jax.Array]
"""tokens and segment_ids, each [B, T + 1] int32."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a run continues from.

    Attributes:
      step: optimizer steps made, int32.
      samples: windows read, int32: the data cursor. It moves on where a step is skipped, and counts the same whatever
        the batch size or number of hosts.
      skipped: steps skipped for a non-finite loss or gradient, int32.
      skipped_in_a_row: the same since the last good step, int32.
      params: nested dictionary of parameters.
      opt_state: optimizer state.
      ema: averaged parameters, or None.
    """

    step: jax.Array
    samples: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    params: Any
    opt_state: Any
    ema: Any


class StepMetrics(NamedTuple):
    """What one step reports: scalars on the device, or numbers once the host has read them.

    Attributes:
      cross_entropy, weight: sums over the step's predicted tokens; their ratio is the loss in nats.
      grad_norm: global gradient norm before clipping.
      learning_rate: rate of this step.
      context_pairs, output_pairs: visible (query, key) pairs of one layer.
      documents: documents in all windows of the step.
      step, samples, skipped, skipped_in_a_row: the state's counters after the step.
    """

    cross_entropy: Any
    weight: Any
    grad_norm: Any
    learning_rate: Any
    context_pairs: Any
    output_pairs: Any
    documents: Any
    step: Any
    samples: Any
    skipped: Any
    skipped_in_a_row: Any


class Program(NamedTuple):
    """Pure functions of one configuration.

    Attributes:
      init: key -> TrainState.
      start: params -> TrainState, the first state of a run with these parameters.
      train_step: (TrainState, Batch) -> (TrainState, StepMetrics).
      eval_step: (params, Batch) -> LossSums.
      graph: the model's structure; `nnx.merge(graph, params)` is the model.
    """

    init: Any
    start: Any
    train_step: Any
    eval_step: Any
    graph: nnx.GraphDef


def make_program(config: Config, schedule_steps: int) -> Program:
    """Builds the functions that a run compiles.

    Args:
      schedule_steps: length of the learning-rate schedule.
    """
    graph, abstract = nnx.split(nnx.eval_shape(lambda: build_model(config.model, nnx.Rngs(0))), nnx.Param)
    schedule = learning_rate_schedule(config.optimizer, schedule_steps)
    optimizer = make_optimizer(config.optimizer, schedule, nnx.to_pure_dict(abstract))

    def init(key: jax.Array) -> TrainState:
        return start(nnx.to_pure_dict(nnx.state(build_model(config.model, nnx.Rngs(key)), nnx.Param)))

    def start(params) -> TrainState:
        step, samples, skipped, in_a_row = (jnp.zeros((), jnp.int32) for _ in range(4))
        ema = jax.tree.map(jnp.copy, params) if config.optimizer.ema_decay else None
        return TrainState(step, samples, skipped, in_a_row, params, optimizer.init(params), ema)

    def losses(params, batch: Batch) -> tuple[LossSums, streams.Layout]:
        rows = batch["tokens"], batch["segment_ids"]
        if "scores" in batch:
            layout, targets = streams.sampled_pretraining(*rows, batch["scores"], output_rows(config))
        else:
            layout, targets = streams.pretraining(*rows)
        model = nnx.merge(graph, params)
        hidden = model(layout)
        sums = cross_entropy(
            hidden,
            model.head_kernel(),
            targets,
            z_loss=config.training.z_loss,
            logits_dtype=config.model.statistics_dtype,
        )
        return sums, layout

    def objective(params, batch: Batch):
        sums, layout = losses(params, batch)
        counts = (*visible_pairs(config.model, layout), _count_documents(batch["segment_ids"]))
        return sums.objective, (sums.cross_entropy, sums.weight, *counts)

    def sums_and_gradients(params, batch: Batch):
        """Sums over the batch and the gradient of the summed objective, micro-batch by micro-batch."""
        gradient = jax.grad(objective, has_aux=True)
        if config.training.accumulation == 1:
            return gradient(params, batch)

        def add(total, micro_batch):
            return jax.tree.map(jnp.add, total, gradient(params, micro_batch)), None

        micro_batches = jax.tree.map(lambda x: _split_batch(x, config.training.accumulation), batch)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, params, batch))
        return jax.lax.scan(add, zeros, micro_batches)[0]

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        if output_rows(config) < config.data.sequence_length:
            key = jax.random.fold_in(jax.random.key(config.training.seed), state.samples)
            batch = batch | {"scores": jax.random.uniform(key, batch["tokens"][:, 1:].shape)}
        gradients, (entropy, weight, context_pairs, output_pairs, documents) = sums_and_gradients(state.params, batch)
        with jax.named_scope("optimizer"):
            gradients = jax.tree.map(lambda g: g / jnp.maximum(weight, 1), gradients)
            grad_norm = optax.tree.norm(gradients)
            is_finite = jnp.isfinite(entropy) & jnp.isfinite(grad_norm)
            updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            ema = None if state.ema is None else update_ema(state.ema, params, config.optimizer.ema_decay)
            # Selected on the device: the host reads the metrics of a step only after it has dispatched the next one.
            kept = (params, opt_state, ema, state.step + 1, jnp.zeros_like(state.skipped_in_a_row))
            before = (state.params, state.opt_state, state.ema, state.step, state.skipped_in_a_row + 1)
            params, opt_state, ema, step, in_a_row = jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), kept, before)
        skipped = state.skipped + jnp.where(is_finite, 0, 1)
        samples = state.samples + batch["tokens"].shape[0]
        metrics = StepMetrics(
            cross_entropy=entropy,
            weight=weight,
            grad_norm=grad_norm,
            learning_rate=schedule(state.step),
            context_pairs=context_pairs,
            output_pairs=output_pairs,
            documents=documents,
            step=step,
            samples=samples,
            skipped=skipped,
            skipped_in_a_row=in_a_row,
        )
        return TrainState(step, samples, skipped, in_a_row, params, opt_state, ema), metrics

    def eval_step(params, batch: Batch) -> LossSums:
        return losses(params, batch)[0]

    return Program(init, start, train_step, eval_step, graph)


def output_rows(config: Config) -> int:
    """Output rows P of each training sequence."""
    return max(1, round(config.training.output_fraction * config.data.sequence_length))


def _split_batch(x: jax.Array, parts: int) -> jax.Array:
    """[B, ...] to [parts, B / parts, ...]; takes every parts-th row, so that each part stays on all batch shards."""
    return jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)


def _count_documents(segment_ids: jax.Array) -> jax.Array:
    """Documents of all windows, float32: segment ids of a window count from 1."""
    return segment_ids.max(axis=1).sum(dtype=jnp.float32)
