"""TPU kernels of a stream whose rows may see any run of keys: blocks of queries over the key blocks they see.

The query blocks of a head visit only the key blocks between the least start and the greatest end of their rows
(`tpu_tiles.Visits`, in scalar memory), with an online softmax (arXiv:2205.14135). The grid is as deep as the
longest visit of the call.

The gradients of keys and values are in `tpu_key_gradient.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dual_stream_attention.tpu_tiles import (
    Rows,
    Schedule,
    Visits,
    block_size,
    dot,
    masked_scores,
    matrix_spec,
    num_steps,
    output,
    schedule,
    score_gradient,
    vector_spec,
)


def forward(q, k, v, start, end, visits: Visits, *, scale: float) -> tuple[jax.Array, jax.Array]:
    """Output [B, N, P, H] and log-sum-exp [B, N, 1, P] of q [B, N, P, H] over k, v [B, K, T, H].

    start, end: visible keys of each row, int32 [B, 1, 1, P]; visits: the key blocks of each query block. P and T
    are multiples of their blocks.
    """
    of_rows, matrix, vector, keys = _specs(q, k)
    steps = num_steps(visits)
    block, head_size = block_size(q.shape[2]), q.shape[3]
    return pl.pallas_call(
        partial(_forward_kernel, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(*q.shape[:2], q.shape[2] // block, steps),
            in_specs=[of_rows, of_rows, matrix, keys, keys],
            out_specs=[matrix, vector],
            scratch_shapes=[
                pltpu.VMEM((1, block), jnp.float32),
                pltpu.VMEM((1, block), jnp.float32),
                pltpu.VMEM((head_size, block), jnp.float32),
            ],
        ),
        out_shape=[output(q.shape, q.dtype, q), output((*q.shape[:2], 1, q.shape[2]), jnp.float32, q)],
        compiler_params=_PARAMS,
        name="sparse_attention",
    )(schedule(visits, steps), start, end, q, k, v)


def query_gradient(rows: Rows, k, v, visits: Visits, *, scale: float) -> jax.Array:
    """Gradient [B, N, P, H] of the queries of `rows`."""
    q = rows.q
    of_rows, matrix, vector, keys = _specs(q, k)
    steps = num_steps(visits)
    block, head_size = block_size(q.shape[2]), q.shape[3]
    return pl.pallas_call(
        partial(_query_gradient_kernel, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(*q.shape[:2], q.shape[2] // block, steps),
            in_specs=[of_rows, of_rows, matrix, keys, keys, matrix, vector, vector],
            out_specs=matrix,
            scratch_shapes=[pltpu.VMEM((head_size, block), jnp.float32)],
        ),
        out_shape=output(q.shape, q.dtype, q),
        compiler_params=_PARAMS,
        name="sparse_attention_query_gradient",
    )(schedule(visits, steps), rows.start, rows.end, q, k, v, rows.d_out, rows.lse, rows.delta)


_PARAMS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"))


def _specs(q, k):
    block, key_block, head_size = block_size(q.shape[2]), block_size(k.shape[2]), q.shape[3]
    group = q.shape[1] // k.shape[1]

    def rows(b, head, i, *_):
        return b, head, i

    def keys(b, head, i, step, schedule: Schedule):
        return b, head // group, schedule.visited(b, i, step)

    return (
        vector_spec(block, lambda b, head, i, *_: (b, 0, i)),
        matrix_spec(block, head_size, rows),
        vector_spec(block, rows),
        matrix_spec(key_block, head_size, keys),
    )


def _forward_kernel(
    schedule, start_ref, end_ref, q_ref, k_ref, v_ref, out_ref, lse_ref, max_ref, sum_ref, acc_ref, *, scale
):
    @pl.when(pl.program_id(3) == 0)
    def _():
        max_ref[...] = jnp.full_like(max_ref, -jnp.inf)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    at = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(schedule.is_visit(*at))
    def _():
        first_key = schedule.visited(*at) * k_ref.shape[0]
        scores = masked_scores(q_ref[...], k_ref[...], start_ref[...], end_ref[...], first_key, scale)
        row_max = max_ref[...]
        new_max = jnp.maximum(row_max, scores.max(axis=0, keepdims=True))
        # A row that has seen no key yet keeps its maximum at -inf: exp must not meet -inf - (-inf).
        finite_max = jnp.where(new_max == -jnp.inf, 0.0, new_max)
        decay = jnp.exp(row_max - finite_max)
        weights = jnp.exp(scores - finite_max)
        max_ref[...] = new_max
        sum_ref[...] = sum_ref[...] * decay + weights.sum(axis=0, keepdims=True)
        acc_ref[...] = acc_ref[...] * decay + dot(v_ref[...], weights.astype(v_ref.dtype), 0, 0)

    @pl.when(pl.program_id(3) == pl.num_programs(3) - 1)
    def _():
        # A row that sees nothing has sum 0 and accumulator 0; its log-sum-exp only has to be finite.
        row_sum = jnp.where(sum_ref[...] == 0.0, 1.0, sum_ref[...])
        row_max = jnp.where(max_ref[...] == -jnp.inf, 0.0, max_ref[...])
        out_ref[...] = (acc_ref[...] / row_sum).T.astype(out_ref.dtype)
        lse_ref[...] = row_max + jnp.log(row_sum)


def _query_gradient_kernel(
    schedule,
    start_ref,
    end_ref,
    q_ref,
    k_ref,
    v_ref,
    d_out_ref,
    lse_ref,
    delta_ref,
    dq_ref,
    acc_ref,
    *,
    scale,
):
    @pl.when(pl.program_id(3) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    at = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(schedule.is_visit(*at))
    def _():
        first_key = schedule.visited(*at) * k_ref.shape[0]
        scores = masked_scores(q_ref[...], k_ref[...], start_ref[...], end_ref[...], first_key, scale)
        _, d_scores = score_gradient(scores, v_ref[...], d_out_ref[...], lse_ref[...], delta_ref[...])
        acc_ref[...] += dot(k_ref[...], d_scores, 0, 0)

    @pl.when(pl.program_id(3) == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * scale).T.astype(dq_ref.dtype)
