"""Cases of the decode operations, and the numerics rule for them.

The cache holds NaN (int8: its largest number) from each sequence's length on: whatever reads there shows. Truth,
yardstick and limits are those of numerics.py; an 8-bit cache stands for exactly its numbers times their scales.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.paired_decode_attention import reference

LARGEST = {"int8": 127, "float8_e4m3fn": 448}


@dataclass(frozen=True)
class Case:
    """Queries as float32 arrays that hold bfloat16 values; an 8-bit cache in its type, any other as the queries."""

    q_ctx: np.ndarray
    q_out: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    lengths: np.ndarray
    window: int
    scales: dict[str, np.ndarray]

    def arrays(self, dtype) -> tuple[jax.Array, ...]:
        """q_ctx, q_out, k_cache, v_cache, lengths on the device, all that is not of 8 bits in `dtype`."""
        floats = (x if x.itemsize == 1 else x.astype(jnp.dtype(dtype)) for x in (*self.queries, *self.cache))
        return (*(jnp.asarray(x) for x in floats), jnp.asarray(self.lengths))

    @property
    def queries(self):
        return self.q_ctx, self.q_out

    @property
    def cache(self):
        return self.k_cache, self.v_cache

    def truth(self, scale: float | None = None) -> tuple[np.ndarray, np.ndarray]:
        arrays = (*self.queries, *self.cache, self.lengths)
        return reference.paired_decode_attention(*arrays, window=self.window, scale=scale, **self.scales)


def make_case(*, lengths, S, W, N=2, K=2, H=16, cache="bfloat16", spread=1.0, seed=0) -> Case:
    """Random inputs; `cache` is the type of the cache, `spread` the standard deviation of the queries."""
    rng = np.random.default_rng(seed)
    B = len(lengths)

    def draw(*shape):
        return rng.normal(size=shape).astype(ml_dtypes.bfloat16).astype(np.float32)

    k, v = draw(B, K, S, H), draw(B, K, S, H)
    scales = {}
    if cache in LARGEST:
        peaks = np.abs(k).max(axis=(2, 3)), np.abs(v).max(axis=(2, 3))
        scales = {
            name: (peak / LARGEST[cache]).astype(np.float32)
            for name, peak in zip(("k_scale", "v_scale"), peaks, strict=True)
        }
        k, v = (
            (x / scale[:, :, None, None]).round(0 if cache == "int8" else 8).astype(jnp.dtype(cache))
            for x, scale in zip((k, v), scales.values(), strict=True)
        )
    for b, length in enumerate(lengths):
        for x in (k, v):
            x[b, :, length:] = 127 if cache == "int8" else np.nan
    q_ctx, q_out = (np.asarray(spread * draw(B, N, H), ml_dtypes.bfloat16).astype(np.float32) for _ in range(2))
    return Case(q_ctx, q_out, k, v, np.asarray(lengths, np.int32), W, scales)


def without_keys(case: Case, before: int) -> Case:
    """The case with NaN for the first keys and values of its last sequence."""
    k, v = case.k_cache.copy(), case.v_cache.copy()
    for x in (k, v):
        x[-1, :, :before] = np.nan
    return replace(case, k_cache=k, v_cache=v)


def yardstick(case: Case, dtype) -> list[np.ndarray]:
    """Dense attention in jax.numpy: products of operands in `dtype`, a float32 softmax, scales in float32."""
    q_ctx, q_out, k, v, lengths = case.arrays(dtype)
    key = jnp.arange(k.shape[2])
    present = key < lengths[:, None]
    k, v = (jnp.where(present[:, None, :, None], x.astype(dtype), 0) for x in (k, v))
    k_scale, v_scale = (
        jnp.asarray(case.scales.get(name, np.ones(k.shape[:2], np.float32))) for name in ("k_scale", "v_scale")
    )
    outputs = []
    for q, window in ((q_ctx, case.window), (q_out, k.shape[2])):
        visible = present & (key >= lengths[:, None] - window)
        rows = q.reshape(len(lengths), k.shape[1], -1, q.shape[-1])
        scores = jnp.einsum("bkgh,bksh->bkgs", rows, k, preferred_element_type=jnp.float32)
        scores = scores * (k_scale * q.shape[-1] ** -0.5)[:, :, None, None]
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -1e30), axis=-1)
        weights = jnp.where(visible[:, None, None], weights, 0.0).astype(dtype)
        out = jnp.einsum("bkgs,bksh->bkgh", weights, v, preferred_element_type=jnp.float32)
        outputs.append((out * v_scale[:, :, None, None]).reshape(q.shape).astype(dtype))
    return [np.asarray(x, np.float64) for x in outputs]


def assert_numerics(found, case: Case, dtype=jnp.bfloat16) -> None:
    """Asserts the numerics rule for the outputs (o_ctx, o_out) of a backend."""
    for name, x, truth, allowed in zip(("o_ctx", "o_out"), found, case.truth(), yardstick(case, dtype), strict=True):
        error, yardstick_error = np.abs(np.asarray(x, np.float64) - truth), np.abs(allowed - truth)
        slack = 1e-5 * np.abs(truth).max()
        for label, measure in (("maximum", np.max), ("RMS", lambda x: np.sqrt(np.mean(x**2)))):
            limit = 2 * measure(yardstick_error) + slack
            assert measure(error) <= limit, f"{name}: {label} error {measure(error)} above {limit}"


def assert_close(found, case: Case, tolerance: float) -> None:
    """Asserts that (o_ctx, o_out) are the true ones, and exactly zero for sequences of length 0."""
    for name, x, truth in zip(("o_ctx", "o_out"), found, case.truth(), strict=True):
        np.testing.assert_allclose(x, truth, rtol=tolerance, atol=tolerance, err_msg=name)
        assert (np.asarray(x)[case.lengths == 0] == 0).all()
