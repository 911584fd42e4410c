"""The inference engine: prefill in chunks and decode by pairs over a preallocated cache, for every kind of model.

    engine = Engine(config, params, capacity=4096, batch_size=2)
    cache, logits = engine.prefill(tokens, lengths)
    while ...:
        cache, logits = engine.decode(cache, next_tokens)

Nothing waits for the device: tokens may be chosen there from the logits and passed on.
"""

import contextlib
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from orthros_jax.config import ModelConfig
from orthros_jax.errors import UserError
from orthros_jax.inference import programs
from orthros_jax.inference.cache import Cache, CacheFullError, LayerCache, cache_layout, empty_layer
from orthros_jax.inference.cached_attention import cache_spec, halo_rows, rows_spec
from orthros_jax.inference.weights import inference_weights
from orthros_jax.model.attention import KINDS
from orthros_jax.sharding import BATCH_AXES, MESH_AXES

CacheType = Literal["int8", "float8_e4m3fn"]

# cuBLAS is faster than XLA's own products of many rows. For the few rows of decode it is the other way round.
_GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False}

_LEAST_ROWS = 128
"""Rows of the smallest prefill program."""


def inference_mesh(*, tensor: int = 1, context: int = 1, data: int = 1, devices: list | None = None) -> Mesh:
    """A mesh: `tensor` cuts heads, feed-forward width and vocabulary, `context` prompts, `data` the batch."""
    sizes = {"data": data, "fsdp": 1, "context": context, "tensor": tensor}
    shape = tuple(sizes[axis] for axis in MESH_AXES)
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


class Engine:
    """Programs, weights and settings that serve batches of `batch_size` sequences.

    Args:
      config: the model.
      params: parameters in the training layout, NumPy or jax arrays; see `inference_weights`.
      capacity: tokens of a sequence, prompt and generated together. A sliding-window model keeps its last W tokens in
        a ring that is never full, and takes any number.
      chunk: rows that a prefill program takes of each sequence; activations grow with it. With a context axis each
        device takes its share of them.
      cache_dtype: 8-bit type of the cache; None for the compute type.
      mesh: see `inference_mesh`; None for the default device.

    Raises:
      UserError: mesh, chunk and model do not fit together.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        *,
        capacity: int,
        batch_size: int = 1,
        chunk: int = 8192,
        cache_dtype: CacheType | None = None,
        mesh: Mesh | None = None,
    ):
        if capacity < 1 or batch_size < 1 or chunk < 1:
            raise UserError(f"capacity {capacity}, batch size {batch_size} and chunk {chunk} must be positive")
        shards = 1 if mesh is None else mesh.shape.get("context", 1)
        self.config, self.capacity, self.batch_size, self._mesh = config, capacity, batch_size, mesh
        if shards == 1:
            chunk = min(chunk, _power_of_two(capacity))
        if mesh is not None:
            _check_mesh(config, mesh, chunk, batch_size)
        self._layout = cache_layout(config, capacity=capacity, chunk=chunk // shards, shards=shards, dtype=cache_dtype)
        self._rows = chunk
        self._weights = inference_weights(params, config, mesh)
        static = {"config": config, "layout": self._layout}
        self._chunk = jax.jit(
            partial(programs.prefill_chunk, **static),
            static_argnames=("is_first",),
            donate_argnames=("state",),
            compiler_options=_GPU_OPTIONS if jax.default_backend() == "gpu" else None,
        )
        self._output = jax.jit(partial(programs.prefill_output, **static))
        self._decode = jax.jit(partial(programs.decode_token, **static), donate_argnames=("caches",))
        self._allocate = jax.jit(
            self._empty_caches, out_shardings=self._sharding((cache_spec(self._layout),) * config.num_layers)
        )
        self._start = jax.jit(self._empty_carry, out_shardings=self._sharding((rows_spec(self._layout), P(BATCH_AXES))))

    def prefill(self, tokens: np.ndarray, lengths: np.ndarray, cache: Cache | None = None) -> tuple[Cache, jax.Array]:
        """Reads a prompt for each sequence of the batch.

        Args:
          tokens: int [B, T], prompts with anything behind them.
          lengths: int [B], tokens of each prompt.
          cache: one of this engine's to fill anew, which must not be used after; None allocates one.

        Returns:
          The cache, and the scores [B, V] of the token after each prompt.

        Raises:
          UserError: a prompt is empty.
          CacheFullError: a prompt is longer than the capacity.
          ValueError: shapes do not fit the batch.
        """
        tokens, lengths = np.asarray(tokens, np.int32), np.asarray(lengths, np.int32)
        if tokens.ndim != 2 or len(tokens) != self.batch_size or lengths.shape != (self.batch_size,):
            raise ValueError(
                f"a batch of {self.batch_size} needs tokens [B, T] and lengths [B], got {tokens.shape}, {lengths.shape}"
            )
        longest = int(lengths.max())
        if lengths.min() < 1:
            raise UserError(f"prompt {int(lengths.argmin())} is empty; a prompt needs at least one token")
        if longest > tokens.shape[1]:
            raise ValueError(f"lengths of up to {longest} for tokens of shape {tokens.shape}")
        self._check_room(longest)
        with self._on_mesh():
            on_device = self._put(lengths)
            halos, rows = self._start()
            caches = self._allocate() if cache is None else cache.layers
            state = programs.Prefill(caches, halos, rows)
            for start in range(0, longest, self._rows):
                part = tokens[:, start : min(start + self._rows, longest)]
                part = np.pad(part, ((0, 0), (0, self._program_rows(part.shape[1]) - part.shape[1])))
                state = self._chunk(
                    self._weights, state, self._put(part), np.int32(start), on_device, is_first=start == 0
                )
            logits = self._output(self._weights, state.caches, state.rows, on_device)
        return Cache(state.caches, on_device, longest), logits

    def decode(self, cache: Cache, tokens: jax.Array | np.ndarray) -> tuple[Cache, jax.Array]:
        """Appends one token to each sequence.

        Args:
          cache: what `prefill` or `decode` returned; its arrays are overwritten and must not be used after.
          tokens: int32 [B].

        Returns:
          The cache, and the scores [B, V] of the token after the new one.

        Raises:
          CacheFullError: the longest sequence has reached the capacity.
        """
        self._check_room(cache.longest + 1)
        with self._on_mesh():
            caches, lengths, logits = self._decode(
                self._weights, cache.layers, cache.lengths, jnp.asarray(tokens, jnp.int32)
            )
        return Cache(caches, lengths, cache.longest + 1), logits

    def _check_room(self, needed: int) -> None:
        if needed > self.capacity and not self._layout.is_ring:
            raise CacheFullError(needed, self.capacity)

    def _program_rows(self, num_rows: int) -> int:
        """Rows of the program for the last `num_rows` tokens: of few sizes, so that few programs are compiled."""
        if self._layout.shards > 1:
            return self._rows
        return min(self._rows, max(_LEAST_ROWS, _power_of_two(num_rows)))

    def _empty_caches(self) -> tuple[LayerCache, ...]:
        return tuple(empty_layer(self.config, self._layout, self.batch_size) for _ in range(self.config.num_layers))

    def _empty_carry(self):
        config, num_rows = self.config, self._layout.shards * halo_rows(self.config)
        shape = (self.batch_size, num_rows, config.num_kv_heads, config.head_dim)
        halo = None if num_rows == 0 else (jnp.zeros(shape, config.compute_dtype),) * 2
        rows = jnp.zeros((self.batch_size, config.model_dim), config.compute_dtype)
        return (halo,) * (config.num_layers - 1), rows

    def _on_mesh(self):
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def _put(self, x: np.ndarray) -> jax.Array:
        return jax.device_put(x, self._sharding(P(BATCH_AXES)))

    def _sharding(self, specs):
        if self._mesh is None:
            # Stated, so that all arrays that reach a program are placed alike: one that JAX may move compiles anew.
            return SingleDeviceSharding(jax.local_devices()[0])
        mesh = self._mesh
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))


def _check_mesh(config: ModelConfig, mesh: Mesh, chunk: int, batch_size: int) -> None:
    """Refuses what the mesh does not cut into equal parts."""
    shards, tensor, data = (mesh.shape.get(name, 1) for name in ("context", "tensor", "data"))
    for name in ("num_kv_heads", "ffn_dim", "vocab_size"):
        if getattr(config, name) % tensor:
            raise UserError(f"a tensor axis of {tensor} does not divide {name} {getattr(config, name)}")
    if batch_size % data:
        raise UserError(f"a batch of {batch_size} over {data} devices is not the same number for each")
    if shards == 1:
        return
    if not KINDS[config.kind](config).doubled:
        raise UserError(f"a prompt can be cut over a context axis for kind orthros only, not for {config.kind}")
    if chunk % shards or chunk // shards < halo_rows(config):
        raise UserError(
            f"a chunk of {chunk} rows over {shards} devices must give each the same number, at least "
            f"{halo_rows(config)} (window {config.window}); choose another chunk"
        )


def _power_of_two(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << (n - 1).bit_length()
