"""Attention over sequences that are cut over devices: what one device does for its part of the rows.

A window of W keys reaches W - 1 rows back, so a device fetches that many keys from its left neighbour and is done.
Rows that see the whole past need all keys: the keys and values of the sequence are gathered. Causality gives the last
part of a sequence far more to do than the first; so the sequence is cut in twice as many chunks as there are devices,
and device i computes chunks i and 2c - 1 - i, one from each end, whose work adds up to the same on every device.

Shapes are those of one device: t = T / c rows of a sequence that c devices share, K and N already cut by `tensor`.
"""

import jax
import jax.numpy as jnp

import pallas_kernels

AXIS = "context"
# Rows of a halo come in whole blocks of the kernels.
_HALO_UNIT = 128


def attend_context(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    out_index: jax.Array | None,
    window: int | None,
    impl: str,
) -> jax.Array:
    """One stream's attention inside a map over the axis `context`.

    Args:
      q: [b, p, N, H] queries of this device's rows.
      k, v: [b, t, K, H] keys and values of this device's rows.
      segment_ids: [b, t], or None for one document.
      out_index: [b, p] rows of the whole sequence, or None where p = t and they are this device's rows.
      window: keys that a row sees, None for all up to its own.

    Returns:
      [b, p, N, H].
    """
    if segment_ids is None:
        segment_ids = jnp.ones(k.shape[:2], jnp.int32)
    if out_index is None and window is not None and window - 1 <= k.shape[1]:
        return _with_halo(q, k, v, segment_ids, window, impl)
    k, v, all_ids = (jax.lax.all_gather(x, AXIS, axis=1, tiled=True) for x in (k, v, segment_ids))
    mask = {"window": window, "segment_ids": all_ids, "impl": impl}
    if out_index is not None:
        return pallas_kernels.cross_attention(q, k, v, out_index=out_index, **mask)
    index = jnp.broadcast_to(_balanced_rows(q.shape[1]), q.shape[:2])
    return _to_own_rows(pallas_kernels.cross_attention(_to_balanced_rows(q), k, v, out_index=index, **mask))


def _with_halo(q, k, v, segment_ids, window, impl):
    """Windowed attention with the last keys of the left neighbour in front.

    Those rows get queries too, of zeros, whose outputs nobody reads: queries and keys are then the rows of one
    sequence, for which the kernels are fastest. The first device's neighbour is padding, which no row sees.
    """
    halo = min(k.shape[1], -(-(window - 1) // _HALO_UNIT) * _HALO_UNIT)
    if halo == 0:
        return pallas_kernels.sliding_window_attention(q, k, v, window=window, segment_ids=segment_ids, impl=impl)
    parts = jax.lax.axis_size(AXIS)
    to_the_right = [(i, i + 1) for i in range(parts - 1)]

    def with_halo(x):
        # Who receives nothing has zeros.
        received = jax.lax.ppermute(x[:, x.shape[1] - halo :], AXIS, to_the_right)
        return jnp.concatenate([received, x], axis=1)

    q = jnp.pad(q, ((0, 0), (halo, 0), (0, 0), (0, 0)))
    k, v, segment_ids = with_halo(k), with_halo(v), with_halo(segment_ids)
    out = pallas_kernels.sliding_window_attention(q, k, v, window=window, segment_ids=segment_ids, impl=impl)
    return out[:, halo:]


def _owner(chunk: int, parts: int) -> int:
    """The device that computes a chunk."""
    return chunk if chunk < parts else 2 * parts - 1 - chunk


def _routes(parts: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Where each device sends the first and the second of its two chunks: two permutations of the devices."""
    return tuple([(i, _owner(2 * i + half, parts)) for i in range(parts)] for half in (0, 1))  # pyright: ignore


def _to_balanced_rows(x):
    """This device's rows [b, t, ...] to the two chunks that it computes, in the order of the sequence."""
    first, second = _routes(jax.lax.axis_size(AXIS))
    even, odd = jnp.split(x, 2, axis=1)
    # Of chunks i and 2c - 1 - i one is even and one is odd.
    return _in_order(_send(even, first), _send(odd, second))


def _to_own_rows(x):
    """The inverse of `_to_balanced_rows`."""
    first, second = _routes(jax.lax.axis_size(AXIS))
    even, odd = jnp.split(_in_order(*jnp.split(x, 2, axis=1)), 2, axis=1)
    back = [[(target, source) for source, target in route] for route in (first, second)]
    return jnp.concatenate([_send(even, back[0]), _send(odd, back[1])], axis=1)


def _send(x, route):
    """Along a permutation of the devices; between two devices one of the routes is the identity."""
    return x if all(source == target for source, target in route) else jax.lax.ppermute(x, AXIS, route)


def _in_order(a, b):
    """a, b where this device's number is even, else b, a."""
    is_even = jax.lax.axis_index(AXIS) % 2 == 0
    return jnp.concatenate([jnp.where(is_even, a, b), jnp.where(is_even, b, a)], axis=1)


def _balanced_rows(num_rows: int) -> jax.Array:
    """Rows of the sequence that this device computes, [1, t] int32 and increasing."""
    parts, part = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
    chunk = jnp.arange(num_rows // 2, dtype=jnp.int32)
    starts = jnp.stack([part, 2 * parts - 1 - part]) * (num_rows // 2)
    return (starts[:, None] + chunk).reshape(1, num_rows).astype(jnp.int32)
