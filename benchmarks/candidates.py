"""What the attention benchmark times: our backends, and the peers that are installed.

A program maps the inputs of a shape to named results: outputs `o_*`, and gradients `dq_*`, `dk`, `dv`. Packages of
peers are imported when a program is traced, so that an absent one is an error of its own programs alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from benchmarks.shapes import ROWS, STREAMS, DecodeShape, TrainingShape

Arrays = dict[str, jax.Array]
Program = Callable[[Arrays], Arrays]

BACKENDS = ("hopper", "cudnn", "xla")
"""Our backends of the training operation. None has other code for deterministic=False."""

DECODE_BACKENDS = ("triton", "xla")

PEERS = ("flash-attn3-jax", "jax-linear-attention", "tokamax", "einops", "jax-triton", "triton", "nvidia-cudnn-cu13")
"""Distributions whose versions matter to the peers and to our kernels."""

_MOST_XLA_OPERATIONS = 2**33
"""XLA's loops are for other machines: beyond this many operations of a forward pass they only cost time."""


@dataclass(frozen=True)
class Candidate:
    name: str
    is_peer: bool
    program: Program


def training_candidates(shape: TrainingShape, case: str, gradients: bool) -> Iterator[Candidate]:
    """Programs of one case of `STREAMS`: the forward pass, or both passes with given output gradients."""
    streams = STREAMS[case]
    small = shape.cost(streams, False).operations <= _MOST_XLA_OPERATIONS
    for impl in BACKENDS:
        if impl != "xla" or small:
            yield Candidate(f"ours {impl}", False, training_program(shape, case, gradients, impl))
    if len(streams) == 1:
        window = shape.window if case == "window" else None
        for name, attention in _peers(shape, window, gradients).items():
            yield Candidate(name, True, _program(_single(attention), streams, gradients))


def training_program(shape: TrainingShape, case: str, gradients: bool, impl: Any = "xla") -> Program:
    """Our operation for one case of `STREAMS`."""

    def attention(queries, k, v, segment_ids):
        options = {"segment_ids": segment_ids, "impl": impl}
        if case == "both":
            q_ctx, q_out = queries
            return pallas_kernels.dual_stream_attention(q_ctx, q_out, k, v, window=shape.window, **options)
        (q,) = queries
        if case == "window":
            return (pallas_kernels.sliding_window_attention(q, k, v, window=shape.window, **options),)
        return (pallas_kernels.cross_attention(q, k, v, **options),)

    return _program(attention, STREAMS[case], gradients)


def _program(attention, streams: tuple[str, ...], gradients: bool) -> Program:
    """Program of attention(queries, k, v, segment_ids), which takes and returns one array a stream."""

    def program(inputs: Arrays) -> Arrays:
        def outputs_of(queries, k, v):
            return attention(queries, k, v, inputs.get("segment_ids"))

        operands = tuple(inputs[f"q_{s}"] for s in streams), inputs["k"], inputs["v"]
        if not gradients:
            return _named("o", streams, outputs_of(*operands))
        # With the output gradients as inputs, no kernel of a loss is in the time.
        outputs, pull_back = jax.vjp(outputs_of, *operands)
        d_queries, dk, dv = pull_back(tuple(inputs[f"do_{s}"] for s in streams))
        return _named("o", streams, outputs) | _named("dq", streams, d_queries) | {"dk": dk, "dv": dv}

    return program


def _named(prefix: str, streams: tuple[str, ...], arrays) -> Arrays:
    return {f"{prefix}_{stream}": array for stream, array in zip(streams, arrays, strict=True)}


def _single(attention):
    return lambda queries, k, v, segment_ids: (attention(*queries, k, v, segment_ids),)


def _peers(shape: TrainingShape, window: int | None, gradients: bool) -> dict[str, Callable]:
    """Peers by name, as causal attention(q, k, v, segment_ids) over the last `window` keys, or over all if None."""
    left = None if window is None else (window - 1, 0)

    def flash_attention_3(q, k, v, segment_ids):
        # Its wheel holds kernels for a head size of 128 alone; zeros change neither scores nor outputs.
        fa3 = import_module("flash_attn3_jax")
        padding = ((0, 0), (0, 0), (0, 0), (0, 128 - shape.head_size))
        q, k, v = (jnp.pad(x, padding) for x in (q, k, v))
        mask = {"is_causal": True} if left is None else {"window_size": left}
        options = {"softmax_scale": shape.head_size**-0.5, **mask}
        if segment_ids is None:
            return fa3.flash_mha(q, k, v, **options)[..., : shape.head_size]
        lengths = shape.document_lengths()
        starts = jnp.asarray([0, *lengths.cumsum()], jnp.int32)
        longest = int(lengths.max())
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        out = fa3.flash_mha_varlen(q, k, v, starts, max_seqlen_q=longest, max_seqlen_k=longest, **options)
        return out.reshape(shape.batch, shape.length, *out.shape[1:])[..., : shape.head_size]

    def jla(backward):
        def attention(q, k, v, segment_ids):
            module = import_module("jla.ops.mosaic_gpu.attention")
            return module.flash_attention(q, k, v, segment_ids=segment_ids, sliding_window=window, backward=backward)

        return attention

    def tokamax(q, k, v, segment_ids):
        _refuse_documents(segment_ids)
        attention = import_module("tokamax").dot_product_attention
        return attention(q, k, v, is_causal=True, local_window_size=left, implementation="mosaic")

    def cudnn(q, k, v, segment_ids):
        _refuse_documents(segment_ids)
        options: dict[str, Any] = {"is_causal": True, "local_window_size": left, "implementation": "cudnn"}
        return jax.nn.dot_product_attention(q, k, v, **options)

    backwards = {"jla ranged": jla("ranged"), "jla fused": jla("fused")} if gradients else {"jla": jla("ranged")}
    return {"FA3": flash_attention_3, **backwards, "tokamax": tokamax, "cuDNN": cudnn}


def _refuse_documents(segment_ids) -> None:
    if segment_ids is not None:
        raise NotImplementedError("it takes no segment ids")


def decode_candidates(shape: DecodeShape, case: str) -> Iterator[Candidate]:
    """Programs of one case of `ROWS`."""
    for impl in DECODE_BACKENDS:
        yield Candidate(f"ours {impl}", False, decode_program(shape, case, impl))
    if case == "one row":
        for name, attention in _decode_peers().items():
            yield Candidate(name, True, _row_program(attention))


def decode_program(shape: DecodeShape, case: str, impl: Any = "xla") -> Program:
    """Our operation for one case of `ROWS`."""

    def program(inputs: Arrays) -> Arrays:
        cache = inputs["k"], inputs["v"], inputs["lengths"]
        if case == "one row":
            return {"o_out": pallas_kernels.decode_attention(inputs["q_out"], *cache, impl=impl)}
        queries = inputs["q_ctx"], inputs["q_out"]
        outputs = pallas_kernels.paired_decode_attention(*queries, *cache, window=shape.window, impl=impl)
        return _named("o", ROWS[case], outputs)

    return program


def decode_layouts(inputs: Arrays) -> Arrays:
    """The inputs with the caches also as [B, S, K, H], the layout of the peers, which therefore is in no time."""
    return inputs | {f"{name}_by_token": jnp.swapaxes(inputs[name], 1, 2) for name in ("k", "v")}


def _row_program(attention) -> Program:
    def program(inputs: Arrays) -> Arrays:
        return {"o_out": attention(inputs["q_out"][:, None], inputs["k_by_token"], inputs["v_by_token"])[:, 0]}

    return program


def _decode_peers() -> dict[str, Callable]:
    """Peers by name, as attention(q [B, 1, N, H], k, v [B, S, K, H]) over the whole cache."""

    def flash_attention_3(splits):
        def attention(q, k, v):
            return import_module("flash_attn3_jax").flash_mha_with_kvcache(q, k, v, num_splits=splits)

        return attention

    def cudnn(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

    return {f"FA3, {splits} splits": flash_attention_3(splits) for splits in (8, 16, 32)} | {"cuDNN": cudnn}
