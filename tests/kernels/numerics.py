"""The numerics rule of every attention backend, and the cases that all of them must get right.

Inputs are bfloat16 values. The truth is the float64 reference; the yardstick is plain dense attention in
jax.numpy with products in the inputs' type and a float32 softmax. RMS and maximum error of a backend, for
values and for each gradient, may be at most twice the yardstick's plus 1e-5 of the largest true value.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dual_stream_attention import reference

NAMES = ("o_ctx", "o_out", "dq_ctx", "dq_out", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """Inputs of `dual_stream_attention` and cotangents, as float32 arrays that hold bfloat16 values."""

    arrays: tuple[np.ndarray, ...]
    cotangents: tuple[np.ndarray, ...]
    window: int
    out_window: int | None
    segment_ids: np.ndarray | None
    out_index: np.ndarray | None

    @property
    def mask(self) -> dict:
        return {
            "window": self.window,
            "out_window": self.out_window,
            "segment_ids": self.segment_ids,
            "out_index": self.out_index,
        }

    def visible(self) -> tuple[np.ndarray, np.ndarray]:
        """Which keys the context rows and the output rows see, bool [B, rows, T]."""
        batch, num_keys = self.arrays[2].shape[:2]
        context = reference.visible_keys(batch, num_keys, window=self.window, segment_ids=self.segment_ids)
        output = reference.visible_keys(
            batch,
            num_keys,
            window=self.out_window,
            segment_ids=self.segment_ids,
            out_index=self.out_index,
        )
        return context, output

    def truth(self) -> dict[str, np.ndarray]:
        values = reference.dual_stream_attention(*self.arrays, **self.mask)
        grads = reference.dual_stream_attention_grad(*self.arrays, *self.cotangents, **self.mask)
        return dict(zip(NAMES, (*values, *grads), strict=True))


def make_case(*, T, W, B=2, P=None, N=2, K=2, H=8, segments=None, out_index=None, out_window=None, seed=0) -> Case:
    """Random inputs; `segments` lists the (id, length) of each of the B sequences, padded with id 0."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16).astype(jnp.float32))

    rows = P or T
    shapes = (B, T, N, H), (B, rows, N, H), (B, T, K, H), (B, T, K, H)
    segment_ids = None
    if segments is not None:
        segment_ids = np.zeros((B, T), np.int32)
        for ids, runs in zip(segment_ids, segments, strict=True):
            run_ids = np.concatenate([np.full(length, number) for number, length in runs] or [[]])
            ids[: len(run_ids)] = run_ids
    return Case(
        arrays=tuple(draw(*shape) for shape in shapes),
        cotangents=tuple(draw(*shape) for shape in shapes[:2]),
        window=W,
        out_window=out_window,
        segment_ids=segment_ids,
        out_index=None if out_index is None else np.asarray(out_index, np.int32),
    )


def run(attention, case: Case, dtype) -> dict[str, np.ndarray]:
    """Values and gradients of attention(q_ctx, q_out, k, v) under jit, all of the inputs' type."""
    arrays = tuple(jnp.asarray(x, dtype) for x in case.arrays)
    cotangents = tuple(jnp.asarray(x, dtype) for x in case.cotangents)

    @jax.jit
    def values_and_grads(arrays, cotangents):
        values, pull_back = jax.vjp(attention, *arrays)
        return (*values, *pull_back(cotangents))

    results = values_and_grads(arrays, cotangents)
    assert [x.dtype for x in results] == [jnp.dtype(dtype)] * len(NAMES)
    return {name: np.asarray(x, np.float64) for name, x in zip(NAMES, results, strict=True)}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded_gradient(dtype, x):
    """x itself; its gradient is rounded to `dtype`, as an operand of the products that follow."""
    return x


_rounded_gradient.defvjp(lambda dtype, x: (x, None), lambda dtype, _, g: (g.astype(dtype).astype(g.dtype),))


def yardstick(case: Case):
    """Dense attention of both streams as a function of q_ctx, q_out, k, v: products of rounded operands, forward and
    backward, and a float32 softmax."""
    context, output = case.visible()

    def dense(q, k, v, visible):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bpnh,btnh->bnpt", q, k, preferred_element_type=jnp.float32)
        scores = _rounded_gradient(q.dtype, scores) * q.shape[-1] ** -0.5
        scores = jnp.where(visible[:, None], scores, -1e30)
        weights = jnp.where(visible[:, None], jax.nn.softmax(scores, axis=-1), 0.0).astype(q.dtype)
        return jnp.einsum("bnpt,btnh->bpnh", weights, v, preferred_element_type=jnp.float32).astype(q.dtype)

    return lambda q_ctx, q_out, k, v: (dense(q_ctx, k, v, context), dense(q_out, k, v, output))


def assert_numerics(attention, case: Case, dtype=jnp.bfloat16) -> None:
    """Asserts the numerics rule for attention(q_ctx, q_out, k, v), given the mask of the case."""
    truth = case.truth()
    found, allowed = run(attention, case, dtype), run(yardstick(case), case, dtype)
    for name in NAMES:
        error, yardstick_error = np.abs(found[name] - truth[name]), np.abs(allowed[name] - truth[name])
        slack = 1e-5 * np.abs(truth[name]).max()
        for label, measure in (("maximum", np.max), ("RMS", lambda x: np.sqrt(np.mean(x**2)))):
            limit = 2 * measure(yardstick_error) + slack
            assert measure(error) <= limit, f"{name}: {label} error {measure(error)} above {limit}"


def assert_blind_rows_are_zero(results: dict[str, np.ndarray], case: Case) -> None:
    """Rows that see nothing and keys that nobody sees: exactly zero, in values and gradients."""
    context, output = case.visible()
    assert all(np.isfinite(x).all() for x in results.values())
    for name, visible in (("o_ctx", context), ("dq_ctx", context), ("o_out", output), ("dq_out", output)):
        assert (results[name][~visible.any(axis=2)] == 0).all(), name
    seen = context.any(axis=1) | output.any(axis=1)
    assert (results["dk"][~seen] == 0).all()
    assert (results["dv"][~seen] == 0).all()
