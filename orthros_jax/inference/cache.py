"""The key/value cache: how it lies in memory, how rows are written to it, and its 8-bit form.

Letters: B sequences, K key/value heads, S slots, H head size, C rows of a chunk, X devices along the context axis.

A layer's cache is [B, K, S, H], the layout of the decode kernels. A full cache keeps position p in slot p. The ring of
a sliding-window model has W slots and keeps position p in slot p mod W: attention does not mind the order of keys, and
their rotation was fixed when they were made. Where the context axis cuts prompts, a program's chunk of X * C positions
gives C to each device, which appends them to its own slots: a device's slots are in the order of their positions.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from orthros_jax.config import ModelConfig
from orthros_jax.errors import UserError
from orthros_jax.model.attention import KINDS

_LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Largest magnitude of an 8-bit type."""

_HEADROOM = 2.0
"""Largest magnitude that an 8-bit cache can hold over the largest of a prompt's first chunk."""


class CacheFullError(UserError):
    """A prompt, or a sequence that grows, has more tokens than the cache holds."""

    def __init__(self, needed: int, capacity: int):
        super().__init__(
            f"a sequence of {needed} tokens does not fit the cache, whose capacity is {capacity} tokens (prompt and "
            "generated together); make the cache larger, shorten the prompt or generate less"
        )


@dataclass(frozen=True)
class CacheLayout:
    """What is static about a cache.

    Attributes:
      slots: S, slots of a sequence and layer on all devices together.
      is_ring: slot p mod S holds position p, so that the last S positions are kept.
      shards: X, devices that share the slots of a sequence.
      chunk: C, positions that a device takes of each prefill program's X * C.
      dtype: type of the numbers; int8 and float8_e4m3fn have a scale for each sequence and head.
    """

    slots: int
    is_ring: bool
    shards: int
    chunk: int
    dtype: str

    @property
    def is_scaled(self) -> bool:
        return self.dtype in _LIMITS

    def first_row(self) -> jax.Array | int:
        """Row of a chunk at which this device's part of it begins."""
        return jax.lax.axis_index("context") * self.chunk if self.shards > 1 else 0

    def local_count(self, positions: jax.Array) -> jax.Array:
        """How many of the first `positions` positions lie on this device."""
        if self.shards == 1:
            return positions
        stride = self.shards * self.chunk
        rest = positions % stride - self.first_row()
        return positions // stride * self.chunk + jnp.clip(rest, 0, self.chunk)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """Keys and values [B, K, S, H] of one layer; what they must be multiplied by, float32 [B, K], in 8-bit caches."""

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None


@dataclass(frozen=True)
class Cache:
    """Caches of all layers and the tokens that they hold.

    Attributes:
      layers: one `LayerCache` a layer.
      lengths: [B] int32 on the device, tokens of each sequence.
      longest: the largest of them, on the host.
    """

    layers: tuple[LayerCache, ...]
    lengths: jax.Array
    longest: int


def empty_layer(config: ModelConfig, layout: CacheLayout, batch_size: int) -> LayerCache:
    """A layer's cache without tokens."""
    shape = (batch_size, config.num_kv_heads, layout.slots, config.head_dim)
    scales = [jnp.ones(shape[:2], jnp.float32) if layout.is_scaled else None for _ in range(2)]
    return LayerCache(jnp.zeros(shape, layout.dtype), jnp.zeros(shape, layout.dtype), *scales)


def cache_layout(
    config: ModelConfig, *, capacity: int, chunk: int, shards: int = 1, dtype: str | None = None
) -> CacheLayout:
    """Layout for sequences of up to `capacity` tokens; chunks are written whole, so slots are a multiple of them."""
    kind = KINDS[config.kind](config)
    is_ring = not kind.doubled and kind.context_window is not None
    stride = shards * chunk
    slots = config.window if is_ring else -(-capacity // stride) * stride
    return CacheLayout(slots, is_ring, shards, chunk, dtype or config.compute_dtype)


def write_chunk(
    cache: LayerCache,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    layout: CacheLayout,
    *,
    is_first: bool,
) -> LayerCache:
    """Writes a chunk's rows, k and v [B, C, K, H], on each device.

    Args:
      start: position of the chunk's first row, a multiple of X * C.
      lengths: [B] tokens of each prompt. Rows behind them are written to a full cache, where nobody reads them before
        they are overwritten, and not to a ring.
      is_first: the chunk fixes the scales of an 8-bit cache.
    """
    is_token = start + layout.first_row() + jnp.arange(k.shape[1], dtype=jnp.int32) < lengths[:, None]

    def write(slots, scale, rows):
        rows = rows.swapaxes(1, 2)
        if layout.is_scaled and is_first:
            scale = _scale_of(rows, is_token, layout)
        stored = _store(rows, scale, slots.dtype)
        if layout.is_ring:
            return _write_ring(slots, stored, start, lengths), scale
        return jax.lax.dynamic_update_slice_in_dim(slots, stored, start // layout.shards, axis=2), scale

    new_k, k_scale = write(cache.k, cache.k_scale, k)
    new_v, v_scale = write(cache.v, cache.v_scale, v)
    return LayerCache(new_k, new_v, k_scale, v_scale)


def write_token(cache: LayerCache, k: jax.Array, v: jax.Array, positions: jax.Array, layout: CacheLayout) -> LayerCache:
    """Writes one row a sequence, k and v [B, K, H], at its position [B], on the device that keeps it."""
    if layout.is_ring:
        slot = positions % layout.slots
    elif layout.shards > 1:
        is_here = layout.local_count(positions + 1) > layout.local_count(positions)
        slot = jnp.where(is_here, layout.local_count(positions), layout.slots)
    else:
        slot = positions
    batch = jnp.arange(k.shape[0])

    def write(slots, scale, rows):
        stored = _store(rows[:, :, None], scale, slots.dtype)[:, :, 0]
        return slots.at[batch, :, slot].set(stored, mode="drop")

    new_k, new_v = write(cache.k, cache.k_scale, k), write(cache.v, cache.v_scale, v)
    return LayerCache(new_k, new_v, cache.k_scale, cache.v_scale)


def stored(cache: LayerCache, dtype) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B, K, S, H] of all slots in `dtype`."""

    def read(slots, scale):
        return slots if scale is None else (slots.astype(jnp.float32) * scale[..., None, None]).astype(dtype)

    return read(cache.k, cache.k_scale), read(cache.v, cache.v_scale)


def _write_ring(ring: jax.Array, rows: jax.Array, start: jax.Array, lengths: jax.Array) -> jax.Array:
    """The ring [B, K, W, H] after rows [B, K, C, H] at the positions from `start` on that lie below the lengths."""
    num_slots, num_rows = ring.shape[2], rows.shape[2]
    end = jnp.minimum(lengths, start + num_rows)
    # The last position below `end` that falls into each slot.
    position = end[:, None] - 1 - (end[:, None] - 1 - jnp.arange(num_slots)) % num_slots
    row = (position - start)[:, None, :, None]
    new = jnp.take_along_axis(rows, jnp.clip(row, 0, num_rows - 1), axis=2)
    return jnp.where(row >= 0, new, ring)


def _scale_of(rows: jax.Array, is_token: jax.Array, layout: CacheLayout) -> jax.Array:
    """Scales [B, K] of rows [B, K, C, H], of which `is_token` [B, C] count."""
    magnitude = jnp.where(is_token[:, None, :, None], jnp.abs(rows.astype(jnp.float32)), 0.0).max(axis=(2, 3))
    if layout.shards > 1:
        magnitude = jax.lax.pmax(magnitude, "context")
    return jnp.where(magnitude == 0.0, 1.0, magnitude * (_HEADROOM / _LIMITS[layout.dtype]))


def _store(rows: jax.Array, scale: jax.Array | None, dtype) -> jax.Array:
    """Rows [B, K, C, H] as the cache keeps them; numbers beyond the range of an 8-bit type take its end."""
    if scale is None:
        return rows.astype(dtype)
    limit = _LIMITS[jnp.dtype(dtype).name]
    scaled = jnp.clip(rows.astype(jnp.float32) / scale[..., None, None], -limit, limit)
    return (jnp.round(scaled) if jnp.issubdtype(dtype, jnp.integer) else scaled).astype(dtype)
