"""The numerics rule of every attention backend, and the cases that all of them must get right.

Inputs are bfloat16 values. The truth is the float64 reference; the yardstick is dense attention in jax.numpy, forward
and backward, whose products have operands in the inputs' type and whose sums and softmax are float32. RMS and maximum
error of a backend, for values and for each gradient, may be at most twice the yardstick's plus 1e-5 of the largest
true value.
"""

from dataclasses import dataclass
from functools import cache

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


@cache
def _values_and_grads(attention):
    """One program for all calls with the same function: it need not be compiled again."""

    @jax.jit
    def values_and_grads(arrays, cotangents):
        values, pull_back = jax.vjp(attention, *arrays)
        return (*values, *pull_back(cotangents))

    return values_and_grads


def run(attention, case: Case, dtype) -> dict[str, np.ndarray]:
    """Values and gradients of attention(q_ctx, q_out, k, v) under jit, all of the inputs' type."""
    arrays = tuple(jnp.asarray(x, dtype) for x in case.arrays)
    cotangents = tuple(jnp.asarray(x, dtype) for x in case.cotangents)
    results = _values_and_grads(attention)(arrays, cotangents)
    assert [x.dtype for x in results] == [jnp.dtype(dtype)] * len(NAMES)
    return {name: np.asarray(x, np.float64) for name, x in zip(NAMES, results, strict=True)}


def yardstick(case: Case):
    """Dense attention of both streams as a function of q_ctx, q_out, k, v, with its own backward pass.

    The backward pass takes the row sums of output times output gradient from the rounded output, as all backends do.
    """
    context, output = (_dense_attention(visible[:, None, None]) for visible in case.visible())
    return lambda q_ctx, q_out, k, v: (context(q_ctx, k, v), output(q_out, k, v))


def _dense_attention(visible):
    """Attention(q, k, v) over the keys that are visible [B, 1, 1, P, T]."""

    def softmax(q, k):
        scores = _product("bpkgh,btkh->bkgpt", _by_group(q, k), k) * q.shape[-1] ** -0.5
        return jnp.where(visible, jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1), 0.0)

    def forward(q, k, v):
        out = _product("bkgpt,btkh->bpkgh", softmax(q, k).astype(q.dtype), v)
        out = out.reshape(q.shape).astype(q.dtype)
        return out, (q, k, v, out)

    def backward(residuals, d_out):
        q, k, v, out = residuals
        scale, weights = q.shape[-1] ** -0.5, softmax(q, k)
        row_sums = _product("bpkgh,bpkgh->bkgp", _by_group(out, k), _by_group(d_out, k))
        d_weights = _product("bpkgh,btkh->bkgpt", _by_group(d_out, k), v)
        d_scores = (weights * (d_weights - row_sums[..., None])).astype(q.dtype)
        dq = _product("bkgpt,btkh->bpkgh", d_scores, k) * scale
        dk = _product("bkgpt,bpkgh->btkh", d_scores, _by_group(q, k)) * scale
        dv = _product("bkgpt,bpkgh->btkh", weights.astype(q.dtype), _by_group(d_out, k))
        return dq.reshape(q.shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    attention = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
    attention.defvjp(forward, backward)
    return attention


def _product(spec, a, b):
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _by_group(x, k):
    """x [B, P, N, H] as [B, P, K, N / K, H]: the query heads by the key head of k [B, T, K, H] that they see."""
    return x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[3])


def assert_numerics(attention, case: Case, dtype=jnp.bfloat16) -> dict[str, np.ndarray]:
    """Asserts the numerics rule for attention(q_ctx, q_out, k, v), given the mask of the case; returns the results."""
    truth = case.truth()
    found, allowed = run(attention, case, dtype), run(yardstick(case), case, dtype)
    for name in NAMES:
        error, yardstick_error = np.abs(found[name] - truth[name]), np.abs(allowed[name] - truth[name])
        slack = 1e-5 * np.abs(truth[name]).max()
        for label, measure in (("maximum", np.max), ("RMS", lambda x: np.sqrt(np.mean(x**2)))):
            limit = 2 * measure(yardstick_error) + slack
            assert measure(error) <= limit, f"{name}: {label} error {measure(error)} above {limit}"
    return found


def assert_blind_rows_are_zero(results: dict[str, np.ndarray], case: Case) -> None:
    """Rows that see nothing and keys that nobody sees: exactly zero, in values and gradients."""
    context, output = case.visible()
    assert all(np.isfinite(x).all() for x in results.values())
    for name, visible in (("o_ctx", context), ("dq_ctx", context), ("o_out", output), ("dq_out", output)):
        assert (results[name][~visible.any(axis=2)] == 0).all(), name
    seen = context.any(axis=1) | output.any(axis=1)
    assert (results["dk"][~seen] == 0).all()
    assert (results["dv"][~seen] == 0).all()
