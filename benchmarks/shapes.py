"""Named shapes of the attention benchmark and the tests, their inputs, and the work that they are at least.

Letters as in `pallas_kernels`: B batch, T rows, N query heads, K key/value heads, H head size, S capacity of a cache.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

STREAMS = {"both": ("ctx", "out"), "window": ("ctx",), "full": ("out",)}
"""The cases of a training shape, and the streams that attend in each."""

ROWS = {"pair": ("ctx", "out"), "one row": ("out",)}
"""The same for a decode shape."""

_FORWARD_AND_BACKWARD = 3.5
"""Operations of both passes over those of the forward: two matrix products forward, five backward."""


class Cost(NamedTuple):
    """Operations (a multiply-add is two) and bytes to and from memory that no implementation can do without."""

    operations: float
    bytes: float


@dataclass(frozen=True)
class TrainingShape:
    """Shape of `dual_stream_attention` with P = T.

    `documents` are the lengths of the documents of a row, whose sum is T; None is one document without segment ids.
    """

    batch: int
    length: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int = 128
    documents: tuple[int, ...] | None = None

    def document_lengths(self) -> np.ndarray:
        """Lengths [B, documents] of the documents of each row: those of row b are those of row 0, turned by b."""
        return np.stack([np.roll(self.documents or (self.length,), b) for b in range(self.batch)])

    def segment_ids(self) -> np.ndarray | None:
        """Segment ids [B, T], from 1 on in each row."""
        if self.documents is None:
            return None
        ids = np.arange(1, len(self.documents) + 1, dtype=np.int32)
        return np.stack([np.repeat(ids, lengths) for lengths in self.document_lengths()])

    def pairs(self, stream: str) -> int:
        """Number of (row, key) pairs of one sequence and head such that the row sees the key."""
        documents = self.documents or (self.length,)
        if stream == "out":
            return sum(n * (n + 1) // 2 for n in documents)
        return sum(n * w - w * (w - 1) // 2 for n in documents for w in [min(n, self.window)])

    def cost(self, streams: tuple[str, ...], gradients: bool) -> Cost:
        """Cost of the forward pass of these streams, or of both passes.

        The forward reads q, k, v and writes o; with gradients it also writes the log-sum-exp, and the backward
        reads all of these and do, and writes dq, dk, dv. Operations are those of the matrix products.
        """
        forward = 4 * self.head_size * self.num_heads * self.batch * sum(self.pairs(s) for s in streams)
        rows = self.batch * self.length
        queries, keys = (2 * rows * heads * self.head_size for heads in (self.num_heads, self.num_kv_heads))
        statistics = 4 * rows * self.num_heads
        if not gradients:
            return Cost(forward, len(streams) * 2 * queries + 2 * keys)
        return Cost(_FORWARD_AND_BACKWARD * forward, len(streams) * (6 * queries + 2 * statistics) + 6 * keys)

    def inputs(self, seed: int = 0) -> dict[str, jax.Array]:
        """Random bfloat16 queries, keys, values and output gradients, and the segment ids if there are any."""
        queries, keys = (
            (self.batch, self.length, heads, self.head_size) for heads in (self.num_heads, self.num_kv_heads)
        )
        shapes = {"q_ctx": queries, "q_out": queries, "k": keys, "v": keys, "do_ctx": queries, "do_out": queries}
        segment_ids = self.segment_ids()
        return _random(shapes, seed) | ({} if segment_ids is None else {"segment_ids": jnp.asarray(segment_ids)})


@dataclass(frozen=True)
class DecodeShape:
    """Shape of `paired_decode_attention` with a full bfloat16 cache."""

    batch: int
    capacity: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int = 128

    def cost(self, rows: tuple[str, ...]) -> Cost:
        """Cost of one step: every key and value is read once, q is read and o is written for each row."""
        seen = {"ctx": min(self.window, self.capacity), "out": self.capacity}
        heads = self.batch * self.head_size * self.num_heads
        cache = 2 * 2 * self.batch * self.num_kv_heads * self.capacity * self.head_size
        return Cost(4 * heads * sum(seen[row] for row in rows), cache + len(rows) * 2 * 2 * heads)

    def inputs(self, seed: int = 0) -> dict[str, jax.Array]:
        """Random bfloat16 queries and caches [B, K, S, H], and the lengths, all S."""
        queries = (self.batch, self.num_heads, self.head_size)
        caches = (self.batch, self.num_kv_heads, self.capacity, self.head_size)
        arrays = _random({"q_ctx": queries, "q_out": queries, "k": caches, "v": caches}, seed)
        return arrays | {"lengths": jnp.full((self.batch,), self.capacity, jnp.int32)}


Shape = TrainingShape | DecodeShape

SHAPES: dict[str, Shape] = {
    "b8_t2048_h128": TrainingShape(8, 2048, 16, 16, 128),
    "b8_t2048_h64": TrainingShape(8, 2048, 32, 32, 64),
    "b1_t16384_gqa": TrainingShape(1, 16384, 32, 8, 128),
    "b8_t2048_packed": TrainingShape(8, 2048, 16, 16, 128, documents=(700, 90, 1000, 33, 225)),
    "decode_s131072": DecodeShape(2, 131072, 32, 8, 128),
}

TINY_SHAPES: dict[str, Shape] = {
    "tiny": TrainingShape(2, 60, 4, 2, 64, window=16),
    "tiny_packed": TrainingShape(2, 60, 4, 2, 64, window=16, documents=(40, 1, 19)),
    "tiny_decode": DecodeShape(2, 300, 4, 2, 64, window=32),
}
"""For a processor without an accelerator."""


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, jax.Array]:
    @jax.jit
    def draw(key):
        keys = jax.random.split(key, len(shapes))
        return {name: jax.random.normal(keys[i], shapes[name], jnp.bfloat16) for i, name in enumerate(shapes)}

    return draw(jax.random.key(seed))
