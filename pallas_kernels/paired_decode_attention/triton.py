"""Decode attention on NVIDIA GPUs: Triton kernels called through jax-triton.

Decoding is bound by the bytes of the cache. Each program streams one split of the keys of one sequence and key/value
head once for all rows that share the head: the heads of the group, of both streams (the window is a mask). A second,
small kernel merges the splits ("flash decoding"). jax-triton has no rule for partitioning or for vmap: the caller
uses `jax.shard_map`.
"""

import importlib.metadata
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import why_not_nvidia_gpu

_JAX_TRITON = "0.3.1"
_MOST_ROWS = 64


class Config(NamedTuple):
    """How the first kernel divides its work.

    Attributes:
        block: keys of one step of a program.
        num_warps: warps of a program.
        num_stages: steps that are under way at once: the loads of num_stages - 1 of them run ahead.
        programs: programs to divide the cache into, as many as the GPU holds at once.
        least: keys of a split at least.
        most: keys of a split at most, where the batch alone fills the GPU: no program of a ragged batch runs long.
    """

    block: int
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 2 * 132
    least: int = 512
    most: int = 8192


# At least two programs fit a multiprocessor of an H100 or H200 (227 KiB of shared memory), with 64 KiB or more of loads
# in flight. By this arithmetic, but for (128, 2), which was also the fastest of those measured: 0.26 ms for B2 S131072
# N32/8 on an H200, JAX 0.11.2, 2026-11-29 (docs/kernels_log.md).
_CONFIGS = {
    # (head size, bytes an element)
    (64, 2): Config(block=128),
    (64, 1): Config(block=256),
    (128, 2): Config(block=64),
    (128, 1): Config(block=128),
    (256, 2): Config(block=32),
    (256, 1): Config(block=64),
}


def unsupported(q: jax.Array, k_cache: jax.Array) -> str | None:
    """Reason why these kernels cannot do the call on the device that is compiled for, or None."""
    rows, head_size = q.shape[1] * q.shape[2] // k_cache.shape[1], q.shape[3]
    no_gpu = why_not_nvidia_gpu(8.9 if k_cache.dtype == jnp.float8_e4m3fn else 8.0)
    if no_gpu is not None:
        return no_gpu
    if q.dtype == jnp.float32:
        return "it needs bfloat16 or float16 queries, and they are float32"
    if (head_size, k_cache.dtype.itemsize) not in _CONFIGS:
        return f"it needs a head size of 64, 128 or 256, and it is {head_size}"
    if rows > _MOST_ROWS:
        return f"it needs at most {_MOST_ROWS} rows for each key/value head, and there are {rows}"
    try:
        version = importlib.metadata.version("jax-triton")
    except importlib.metadata.PackageNotFoundError:
        return f"jax-triton is not installed (pip install jax-triton=={_JAX_TRITON})"
    if version != _JAX_TRITON:
        return f"it needs jax-triton {_JAX_TRITON}, and {version} is installed (pip install jax-triton=={_JAX_TRITON})"
    return None


def attention(
    q: jax.Array,
    windows: tuple[int, ...],
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    scale: float,
    config: Config | None = None,
    compute_capability: int | None = None,
) -> jax.Array:
    """Output [B, R, N, H] of rows q [B, R, N, H]; row r sees the last windows[r] of the keys [0, lengths).

    `config` and `compute_capability` (90 for 9.0) are for measurements and for compiling without a GPU.
    """
    import jax_triton  # pyright: ignore[reportMissingImports]

    from pallas_kernels.paired_decode_attention import triton_kernels

    batch, num_kv_heads = k_cache.shape[:2]
    if config is None:
        rows = q.shape[1] * q.shape[2] // num_kv_heads
        config = choose_config(rows, q.shape[3], k_cache.dtype.itemsize)
    split, merge = launches(q.shape, k_cache.shape, windows, scale, config)
    rows = split["R"] * split["G"]
    partial_shape = (batch, num_kv_heads, split["SPLITS"], rows)
    partials = jax_triton.triton_call(
        q, k_cache, v_cache, lengths, k_scale,
        kernel=triton_kernels.attend_to_split,
        out_shape=(
            jax.ShapeDtypeStruct((*partial_shape, q.shape[3]), jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        ),
        grid=(split["SPLITS"], num_kv_heads, batch),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        compute_capability=compute_capability,
        **split,
    )  # fmt: skip
    return jax_triton.triton_call(
        *partials, v_scale,
        kernel=triton_kernels.merge_splits,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(rows, num_kv_heads, batch),
        compute_capability=compute_capability,
        **merge,
    )  # fmt: skip


def choose_config(rows: int, head_size: int, bytes_per_element: int) -> Config:
    """Config for `rows` rows that share a key/value head."""
    config = _CONFIGS[head_size, bytes_per_element]
    # The accumulators of more rows need the registers of more threads.
    return config._replace(num_warps=2 * config.num_warps) if rows > 32 else config


def launches(q_shape, cache_shape, windows, scale, config) -> tuple[dict, dict]:
    """Compile-time arguments of the two kernels. Their grids are (SPLITS, K, B) and (R * G, K, B)."""
    batch, num_rows, num_heads, head_size = q_shape
    num_kv_heads, capacity = cache_shape[1:3]
    group = num_heads // num_kv_heads
    splits = num_splits(batch * num_kv_heads, min(max(windows), capacity), config)
    merge = {"R": num_rows, "K": num_kv_heads, "G": group, "H": head_size, "SPLITS": splits}
    split = {
        **merge,
        "S": capacity,
        "SCALE": scale,
        "WINDOWS": tuple(windows),
        "LEAST": config.least,
        # The tensor cores take at least 16 rows.
        "ROWS": max(16, _power_of_two(num_rows * group)),
        "BLOCK": config.block,
    }
    return split, {**merge, "BLOCK": min(32, _power_of_two(splits))}


def num_splits(num_cache_heads: int, num_keys: int, config: Config) -> int:
    """Splits of `num_keys` keys: as many as fill the GPU, within the bounds of the config on the keys of a split."""
    at_least = -(-num_keys // config.most)
    at_most = -(-num_keys // config.least)
    return min(max(config.programs // num_cache_heads, at_least, 1), at_most)


def _power_of_two(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << (n - 1).bit_length()
