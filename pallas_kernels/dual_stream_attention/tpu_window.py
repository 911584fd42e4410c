"""TPU kernels of a windowed stream: a block of query rows, the keys of its own rows, and a halo of keys before them.

Query row i stands at row i of the sequence and sees at most the halo + 1 keys that end with its own. A grid step
fetches the block and its halo and works through it by tiles of 128 rows, each over the 128 + halo keys that its
rows can see: a window of 128 costs 256 keys a row, whatever the block. Segments only mask.

The gradients of keys and values are in `tpu_key_gradient.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dual_stream_attention.tpu_tiles import (
    BLOCK,
    TILE,
    Rows,
    block_size,
    dot,
    masked_scores,
    matrix_spec,
    output,
    score_gradient,
    vector_spec,
)


def halo_of(window: int | None, num_keys: int) -> int | None:
    """Keys before its own that a tile of a stream reads, 128, 256 or 512; None if the window is wider than that."""
    window = num_keys if window is None else min(window, num_keys)
    return block_size(window - 1) if window <= BLOCK + 1 else None


def forward(q, k, v, start, end, *, halo: int, scale: float) -> tuple[jax.Array, jax.Array]:
    """Output [B, N, T, H] and log-sum-exp [B, N, 1, T] of q [B, N, T, H] over k, v [B, K, T, H].

    start, end: visible keys of each row, int32 [B, 1, 1, T]. T is a multiple of its block.
    """
    grid, of_rows, matrix, vector, keys = _specs(q, k, halo)
    return pl.pallas_call(
        partial(_forward_kernel, scale=scale),
        grid=grid,
        in_specs=[of_rows, of_rows, matrix, *keys, *keys],
        out_specs=[matrix, vector],
        out_shape=[output(q.shape, q.dtype, q), output((*q.shape[:2], 1, q.shape[2]), jnp.float32, q)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 4),
        name="window_attention",
    )(start, end, q, k, k, v, v)


def query_gradient(rows: Rows, k, v, *, halo: int, scale: float) -> jax.Array:
    """Gradient [B, N, T, H] of the queries of `rows`."""
    q = rows.q
    grid, of_rows, matrix, vector, keys = _specs(q, k, halo)
    return pl.pallas_call(
        partial(_query_gradient_kernel, scale=scale),
        grid=grid,
        in_specs=[of_rows, of_rows, matrix, *keys, *keys, matrix, vector, vector],
        out_specs=matrix,
        out_shape=output(q.shape, q.dtype, q),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 4),
        name="window_attention_query_gradient",
    )(rows.start, rows.end, q, k, k, v, v, rows.d_out, rows.lse, rows.delta)


def _specs(q, k, halo):
    """Grid and block specs; the heads of a group come last, so that they share what was fetched of the keys."""
    batch, num_heads, length, head_size = q.shape
    num_kv_heads = k.shape[1]
    group, block = num_heads // num_kv_heads, block_size(length)

    def rows(b, kv_head, i, head_of_group):
        return b, kv_head * group + head_of_group, i

    def before(b, kv_head, i, _):
        # The first block has none before it: it reads its own first keys as keys of negative rows, seen by nobody.
        return b, kv_head, jnp.maximum(i * (block // halo) - 1, 0)

    return (
        (batch, num_kv_heads, length // block, group),
        vector_spec(block, lambda b, kv_head, i, _: (b, 0, i)),
        matrix_spec(block, head_size, rows),
        vector_spec(block, rows),
        (
            matrix_spec(halo, head_size, before),
            matrix_spec(block, head_size, lambda b, kv_head, i, _: (b, kv_head, i)),
        ),
    )


def _tiles(start_ref, end_ref, *key_refs):
    """For each tile of the block: its rows, their ranges, the row of its first key, and its keys of each operand."""
    block, halo = start_ref.shape[1], key_refs[0][0].shape[0]
    operands = [jnp.concatenate([before[...], own[...]]) for before, own in key_refs]
    first_key = pl.program_id(2) * block - halo
    for row in range(0, block, TILE):
        rows, keys = slice(row, row + TILE), slice(row, row + TILE + halo)
        yield rows, start_ref[:, rows], end_ref[:, rows], first_key + row, [x[keys] for x in operands]


def _forward_kernel(start_ref, end_ref, q_ref, k_halo_ref, k_ref, v_halo_ref, v_ref, out_ref, lse_ref, *, scale):
    for rows, start, end, first_key, (k, v) in _tiles(start_ref, end_ref, (k_halo_ref, k_ref), (v_halo_ref, v_ref)):
        scores = masked_scores(q_ref[rows], k, start, end, first_key, scale)
        row_max = scores.max(axis=0, keepdims=True)
        # A row that sees nothing has weights 0; exp must not meet -inf - (-inf).
        row_max = jnp.where(row_max == -jnp.inf, 0.0, row_max)
        weights = jnp.exp(scores - row_max)
        row_sum = weights.sum(axis=0, keepdims=True)
        row_sum = jnp.where(row_sum == 0.0, 1.0, row_sum)
        acc = dot(v, weights.astype(v.dtype), 0, 0)
        out_ref[rows] = (acc / row_sum).T.astype(out_ref.dtype)
        lse_ref[:, rows] = row_max + jnp.log(row_sum)


def _query_gradient_kernel(
    start_ref, end_ref, q_ref, k_halo_ref, k_ref, v_halo_ref, v_ref, d_out_ref, lse_ref, delta_ref, dq_ref, *, scale
):
    for rows, start, end, first_key, (k, v) in _tiles(start_ref, end_ref, (k_halo_ref, k_ref), (v_halo_ref, v_ref)):
        scores = masked_scores(q_ref[rows], k, start, end, first_key, scale)
        _, d_scores = score_gradient(scores, v, d_out_ref[rows], lse_ref[:, rows], delta_ref[:, rows])
        dq_ref[rows] = (dot(k, d_scores, 0, 0) * scale).T.astype(dq_ref.dtype)
