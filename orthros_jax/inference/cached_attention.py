"""Attention of a prompt's chunks and of decoded tokens over the cache, on each device's own heads, rows and slots.

Letters: B sequences, C rows of a chunk on one device, R rows of a decoding step, N query heads, K key/value heads, H
head size, W window, S slots, X devices along the context axis.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import pallas_kernels
from orthros_jax.config import ModelConfig
from orthros_jax.inference.cache import CacheLayout, LayerCache, stored, write_chunk, write_token
from orthros_jax.model.attention import KINDS
from orthros_jax.sharding import BATCH_AXES, on_each_device

Halo = tuple[jax.Array, jax.Array]
"""Keys and values [B, X * halo, K, H] of the rows before each device's part of a chunk."""

_HEADS = P(BATCH_AXES, None, "tensor", None)
_SEQUENCES = P(BATCH_AXES)


def halo_rows(config: ModelConfig) -> int:
    """Rows of a halo: W - 1, to the next multiple of the kernels' blocks; none where context rows see everything."""
    window = KINDS[config.kind](config).context_window
    return 0 if window is None else -(-max(window - 1, 1) // 128) * 128


def rows_spec(layout: CacheLayout) -> P:
    """How a chunk's arrays [B, C, heads, H] lie on a mesh."""
    return P(BATCH_AXES, "context" if layout.shards > 1 else None, "tensor", None)


def cache_spec(layout: CacheLayout) -> LayerCache:
    """How a layer's cache lies on a mesh."""
    slots: Any = P(BATCH_AXES, "tensor", "context" if layout.shards > 1 else None, None)
    scale: Any = P(BATCH_AXES, "tensor") if layout.is_scaled else None
    return LayerCache(slots, slots, scale, scale)


def chunk_attention(
    q: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    cache: LayerCache,
    halo: Halo | None,
    start: jax.Array,
    lengths: jax.Array,
    *,
    config: ModelConfig,
    layout: CacheLayout,
    is_first: bool,
) -> tuple[jax.Array | None, LayerCache, Halo | None]:
    """Writes a chunk's keys and values and attends its context rows to what they see.

    Args:
      q: [B, X * C, N, H] queries of the context rows; None in the last layer, which has none.
      k, v: [B, X * C, K, H] of the same rows.
      halo: keys and values of the rows before, for hidden layers with a window.
      start: int32, position of the chunk's first row.
      lengths: [B] int32, tokens of each prompt.
      is_first: start is 0.

    Returns:
      Output [B, X * C, N, H] or None, the cache, and the halo of the next chunk or None.
    """

    def operation(q, k, v, cache, halo, start, lengths):
        cache = write_chunk(cache, k, v, start, lengths, layout, is_first=is_first)
        if q is None:
            return None, cache, None
        if halo is None:
            return _full_attention(q, k, v, cache, start, config, is_first=is_first), cache, None
        out, halo = _window_attention(q, k, v, halo, start, config, layout, is_first=is_first)
        return out, cache, halo

    rows, caches = rows_spec(layout), cache_spec(layout)
    halos = None if halo is None else (rows, rows)
    queries = None if q is None else rows
    in_specs = (queries, rows, rows, caches, halos, P(), _SEQUENCES)
    return on_each_device(operation, in_specs, (queries, caches, halos))(q, k, v, cache, halo, start, lengths)


def token_attention(
    q: jax.Array,
    cache: LayerCache,
    lengths: jax.Array,
    *,
    windows: tuple[int | None, ...],
    new: tuple[jax.Array, jax.Array] | None,
    config: ModelConfig,
    layout: CacheLayout,
) -> tuple[jax.Array, LayerCache]:
    """Writes the keys and values of new tokens, if any, and attends one or two rows of each sequence to the cache.

    Args:
      q: [B, R, N, H] queries of rows at position lengths - 1; with two, the context row comes first.
      lengths: [B] int32, tokens of each sequence, the new one included.
      windows: keys that each row sees, None for all.
      new: k and v [B, 1, K, H] of the new tokens.

    Returns:
      Output [B, R, N, H] and the cache.
    """

    def operation(q, cache, lengths, new):
        if new is not None:
            k, v = (x[:, 0] for x in new)
            cache = write_token(cache, k, v, lengths - 1, layout)
        return _token_attention(q, cache, lengths, windows, config, layout), cache

    caches = cache_spec(layout)
    in_specs = (_HEADS, caches, _SEQUENCES, None if new is None else (_HEADS, _HEADS))
    return on_each_device(operation, in_specs, (_HEADS, caches))(q, cache, lengths, new)


def _full_attention(q, k, v, cache, start, config, *, is_first):
    """Context rows that see the whole past: the chunk itself where it is the first, else the cache."""
    if is_first:
        return pallas_kernels.cross_attention(q, k, v, impl=config.attention_impl)
    position = jnp.broadcast_to(start + jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2])
    return pallas_kernels.cache_attention(q, *stored(cache, q.dtype), position, impl=config.attention_impl)


def _window_attention(q, k, v, halo, start, config, layout, *, is_first):
    """Context rows that see the last W keys: those of the chunk and of the halo before it. Also the next halo."""
    num_halo, num_rows = halo[0].shape[1], q.shape[1]
    options = {"window": config.window, "impl": config.attention_impl}
    received = None
    if layout.shards > 1:
        # A device's halo is the end of its left neighbour's rows; the first device's is from the chunk before.
        shards = layout.shards
        ring = [(x, (x + 1) % shards) for x in range(shards)]
        received = tuple(jax.lax.ppermute(x[:, -num_halo:], "context", ring) for x in (k, v))
        is_first_device = jax.lax.axis_index("context") == 0
        halo = tuple(jnp.where(is_first_device, old, new) for old, new in zip(halo, received, strict=True))
    keys, values = (jnp.concatenate(pair, axis=1) for pair in zip(halo, (k, v), strict=True))
    next_halo = received or (keys[:, -num_halo:], values[:, -num_halo:])
    if is_first and layout.shards == 1:
        return pallas_kernels.sliding_window_attention(q, k, v, **options), next_halo
    segment_ids = None
    if layout.shards > 1 or num_rows < num_halo:
        # The halo may reach back beyond the first position.
        position = start + layout.first_row() - num_halo + jnp.arange(num_halo + num_rows, dtype=jnp.int32)
        segment_ids = jnp.broadcast_to((position >= 0).astype(jnp.int32), keys.shape[:2])
    # The kernels want a query for each key: rows of the halo get one that nobody reads.
    q = jnp.pad(q, ((0, 0), (num_halo, 0), (0, 0), (0, 0)))
    out = pallas_kernels.sliding_window_attention(q, keys, values, segment_ids=segment_ids, **options)
    return out[:, num_halo:], next_halo


def _token_attention(q, cache, lengths, windows, config, layout):
    # The training operation's other backends have no decoding counterpart.
    impl = config.attention_impl if config.attention_impl in ("tpu", "xla") else "auto"
    arrays = (cache.k, cache.v)
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    if layout.shards > 1:
        first = [
            jnp.zeros_like(lengths) if w is None else layout.local_count(jnp.maximum(lengths - w, 0)) for w in windows
        ]
        counts = layout.local_count(lengths)
        return pallas_kernels.sharded_decode_attention(
            q, jnp.stack(first, axis=1), *arrays, counts, axis="context", **scales
        )
    if layout.is_ring:
        lengths, windows = jnp.minimum(lengths, layout.slots), (None,)
    options = {"impl": impl, **scales}
    if len(windows) == 2 and windows[1] is None:
        pair = pallas_kernels.paired_decode_attention(q[:, 0], q[:, 1], *arrays, lengths, window=windows[0], **options)
        return jnp.stack(pair, axis=1)
    rows = [
        pallas_kernels.decode_attention(q[:, r], *arrays, lengths, window=window, **options)
        for r, window in enumerate(windows)
    ]
    return jnp.stack(rows, axis=1)
