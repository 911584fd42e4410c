"""Prefill and decode beside the full-attention Transformer:
python -m benchmarks.inference --shape qwen3-8b --lengths 8192,32768,131072,1048576 --batch 1

Both models have the same random weights, in bfloat16 (Orthros has its scales and offsets besides), and run through the
same engine in one process, in turns. The shape `tiny` runs anywhere.

Time to first token: from the prompts on the host to the first token of the whole batch on the host. Decode: tokens of
the whole batch a second, over the steps that follow. End to end: prompts to the last of `--new-tokens` tokens, all on
the host. Each is the median of `--repeats` runs, fewer where they take longer than `--seconds`. Operations are counted
as in `orthros_jax/model/flops.py`; a prefill's floor is its operations at the ceiling, a decode step's the bytes of
weights and cache. "ratio" is the Transformer's time over Orthros's, "of operations" the same of their operations.

On several devices Orthros cuts prompts over them, with its weights on each, and the Transformer its heads,
feed-forward width and vocabulary: each kind the way that suits it.

A prompt whose cache in bfloat16 does not fit beside the weights gets an 8-bit cache. Where both caches do not fit at
once the kinds run one after the other. The Transformer's time at more than `--longest-full` tokens, or where its cache
in bfloat16 does not fit, is that of one hidden layer, measured, times their number.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.candidates import PEERS
from benchmarks.record import RESULTS, facts, write
from orthros_jax.config import ModelConfig
from orthros_jax.inference.cache import Cache
from orthros_jax.inference.engine import Engine, inference_mesh
from orthros_jax.inference.weights import weight_shapes
from orthros_jax.model.attention import KINDS
from orthros_jax.model.flops import forward_flops
from orthros_jax.training.compiler import use_device_memory

_QWEN3_8B = ModelConfig(
    vocab_size=151936,
    num_layers=36,
    model_dim=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_dim=12288,
    qk_norm=True,
    rope_base=1e6,
    max_sequence_length=1 << 21,
    param_dtype="bfloat16",
)
_TINY = dataclasses.replace(
    _QWEN3_8B, vocab_size=64, num_layers=3, model_dim=32, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=64, window=8
)
SHAPES = {"qwen3-8b": _QWEN3_8B, "tiny": _TINY}
KIND_NAMES = ("orthros", "transformer")


@dataclass(frozen=True)
class Run:
    """Seconds of one run, on the host's clock."""

    first_token: float
    decode: float

    @property
    def end_to_end(self) -> float:
        return self.first_token + self.decode


def random_weights(config: ModelConfig) -> dict[str, Any]:
    """Weights of order 1 / sqrt(fan-in), made on the device a layer at a time; scales and offsets at identity."""

    @partial(jax.jit, static_argnums=1)
    def draw(key, shape):
        return (jax.random.normal(key, shape, jnp.bfloat16) * 0.02).astype(config.compute_dtype)

    keys = iter(range(1 << 30))

    def make(path, leaf):
        name = path[-1].key
        if name == "kernel":
            return draw(jax.random.key(next(keys)), leaf.shape)
        return jnp.zeros(leaf.shape, leaf.dtype) if name == "beta" else jnp.ones(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(make, weight_shapes(config))


def single_stream(weights: dict[str, Any]) -> dict[str, Any]:
    """The same weights without scales and offsets."""

    def strip(layer):
        kept = {name: tree for name, tree in layer["attention"].items() if not name.startswith("scale_offset")}
        return layer | {"attention": kept}

    layers = tuple(strip(layer) for layer in weights["layers"])
    return weights | {"layers": layers, "last_layer": strip(weights["last_layer"])}


def prefill_operations(config: ModelConfig, batch: int, length: int) -> int:
    """Operations from the prompts to the logits of their last tokens."""
    kind = KINDS[config.kind](config)

    def keys(window):
        return length if window is None else min(window, length)

    seen = keys(kind.context_window)
    pairs = seen * (seen + 1) // 2 + (length - seen) * seen
    return batch * forward_flops(config).total(length, 1, pairs, keys(kind.output_window))


def cache_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * tokens * itemsize


def weight_bytes(config: ModelConfig) -> int:
    """Bytes that a decoding step reads: all but the embedding, of which it reads a row."""
    shapes = {name: tree for name, tree in weight_shapes(config).items() if name != "embedding"}
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


class Bench:
    """An engine and the cache that its runs fill in turn."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._cache: Cache | None = None
        self._choose = jax.jit(lambda logits: logits.argmax(-1).astype(jnp.int32))

    def run(self, length: int, new_tokens: int) -> Run:
        """One run over random prompts of `length` tokens."""
        engine = self.engine
        prompts = np.random.default_rng(length).integers(
            0, engine.config.vocab_size, (engine.batch_size, length), np.int32
        )
        lengths = np.full(engine.batch_size, length, np.int32)
        start = time.perf_counter()
        cache, logits = engine.prefill(prompts, lengths, self._cache)
        tokens = self._choose(logits)
        np.asarray(tokens)
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            cache, logits = engine.decode(cache, tokens)
            tokens = self._choose(logits)
        np.asarray(tokens)
        end = time.perf_counter()
        self._cache = cache
        return Run(first - start, end - first)


def in_turns(runs: dict[str, Callable[[], Run]], repeats: int, seconds: float) -> dict[str, list[Run]]:
    """Runs of each, taken in turns, until there are `repeats` or a round more would take longer than `seconds`."""
    found: dict[str, list[Run]] = {name: [] for name in runs}
    start = time.perf_counter()
    for done in range(repeats):
        if done and (time.perf_counter() - start) * (done + 1) / done > seconds:
            break
        for name, run in runs.items():
            found[name].append(run())
    return found


def engine_mesh(kind: str, devices: int) -> Mesh | None:
    """How a kind uses several devices."""
    if devices == 1:
        return None
    axis = "context" if kind == "orthros" else "tensor"
    return inference_mesh(**{axis: devices}, devices=jax.devices()[:devices])


def report(
    config: ModelConfig, batch: int, length: int, new_tokens: int, itemsize: int, runs: list[Run], ceilings, devices=1
):
    """One row of the table: medians, and what they are of the floors on all devices."""
    operations = prefill_operations(config, batch, length)
    first, whole = (statistics.median(getattr(run, name) for run in runs) for name in ("first_token", "end_to_end"))
    steps = max(new_tokens - 1, 1)
    step = statistics.median(run.decode for run in runs) / steps
    copies = devices if config.kind == "orthros" else 1
    read = copies * weight_bytes(config) + batch * cache_bytes(config, length + new_tokens // 2, itemsize)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "kind": config.kind,
        "tokens": length,
        "cache_bytes_per_number": itemsize,
        "first_token_seconds": first,
        "first_token_lowest": min(run.first_token for run in runs),
        "first_token_highest": max(run.first_token for run in runs),
        "operations": operations,
        "tflops_per_device": operations / first / devices / 1e12,
        "first_token_floor": operations / ceilings[0] / devices / first,
        "decode_step_ms": step * 1e3,
        "decode_tokens_per_second": batch / step,
        "decode_floor": read / ceilings[1] / devices / step,
        "end_to_end_seconds": whole,
        "runs": len(runs),
        "peak_gib": stats.get("peak_bytes_in_use", 0) / 2**30,
    }


def layer_estimate(
    config: ModelConfig, weights, length: int, chunk: int, batch: int, devices: int = 1
) -> dict[str, Any]:
    """The Transformer's time to first token: one hidden layer's times their number, and the rest once."""
    seconds = []
    for hidden in (0, 1):
        part = dataclasses.replace(config, num_layers=hidden + 1)
        engine = Engine(
            part,
            weights | {"layers": weights["layers"][:hidden]},
            capacity=length,
            batch_size=batch,
            chunk=chunk,
            mesh=engine_mesh(config.kind, devices),
        )
        bench = Bench(engine)
        bench.run(min(length, 2 * chunk), 1)
        seconds.append(bench.run(length, 1).first_token)
    rest, one = seconds[0], seconds[1] - seconds[0]
    total = rest + (config.num_layers - 1) * one
    operations = prefill_operations(config, batch, length)
    return {
        "kind": config.kind,
        "tokens": length,
        "first_token_seconds": total,
        "hidden_layer_seconds": one,
        "is_estimate": True,
        "operations": operations,
        "tflops_per_device": operations / total / devices / 1e12,
    }


def comparison(rows: list[dict[str, Any]]) -> dict[str, float] | None:
    """Speed-up of Orthros and the ratio of operations, where both kinds were measured."""
    by_kind = {row["kind"]: row for row in rows}
    if set(by_kind) != set(KIND_NAMES):
        return None
    ours, full = (by_kind[kind] for kind in KIND_NAMES)
    found = {
        name: full[key] / ours[key] for name, key in (("ratio", "first_token_seconds"), ("of_operations", "operations"))
    }
    if "decode_step_ms" in full:
        found["pair_over_row"] = ours["decode_step_ms"] / full["decode_step_ms"]
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="another number of layers than the shape's")
    parser.add_argument("--lengths", default="8192,32768,131072,1048576", help="prompt lengths (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1, help="devices to share a prompt (default: %(default)s)")
    parser.add_argument(
        "--chunk", type=int, default=8192, help="tokens of a prefill program for each device (default: %(default)s)"
    )
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=45, help="for the repeats of a length (default: %(default)s)")
    parser.add_argument("--longest-full", type=int, default=262144, help="(default: %(default)s tokens)")
    parser.add_argument(
        "--memory", type=float, default=120e9, help="bytes of a device for weights and cache (default: %(default)s)"
    )
    for name, ceiling in (("operations", 790e12), ("bytes", 4.3e12)):
        text = f"ceiling of the floor (default: {ceiling:.3g}, an H200's)"
        parser.add_argument(f"--{name}-per-second", type=float, default=ceiling, help=text)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON (default: %(default)s)")
    arguments = parser.parse_args(argv)
    argv = sys.argv[1:] if argv is None else argv
    use_device_memory()
    ceilings = (arguments.operations_per_second, arguments.bytes_per_second)
    config = SHAPES[arguments.shape]
    config = dataclasses.replace(config, num_layers=arguments.layers or config.num_layers)
    configs = {kind: dataclasses.replace(config, kind=kind) for kind in KIND_NAMES}
    result = facts("inference", argv, PEERS) | {
        "command": " ".join(["python -m benchmarks.inference", *argv]),
        "devices": arguments.devices,
        "batch": arguments.batch,
        "chunk": arguments.chunk,
        "new_tokens": arguments.new_tokens,
        "ceilings": {"operations": ceilings[0], "bytes": ceilings[1]},
        "rows": [],
        "comparisons": {},
    }
    print(
        f"{result['device']}, JAX {result['versions']['jax']}, {result['date']}, commit {result['commit']}", flush=True
    )
    weights = {"orthros": random_weights(configs["orthros"])}
    weights["transformer"] = single_stream(weights["orthros"])
    lengths = sorted(int(n) for n in arguments.lengths.split(","))
    devices = arguments.devices
    chunk = devices * max(128, arguments.chunk // arguments.batch)

    def measure(lengths: list[int], kinds: tuple[str, ...], cache_dtype, itemsize: int) -> None:
        benches = {}
        for kind in kinds:
            start = time.perf_counter()
            engine = Engine(
                configs[kind],
                weights[kind],
                capacity=max(lengths) + arguments.new_tokens,
                batch_size=arguments.batch,
                chunk=chunk,
                cache_dtype=cache_dtype,
                mesh=engine_mesh(kind, devices),
            )
            benches[kind] = Bench(engine)
            benches[kind].run(min(max(lengths), 2 * chunk), 3)
            print(f"{kind}: compiled and run once in {time.perf_counter() - start:.0f} s", flush=True)
        for length in lengths:
            runs = in_turns(
                {kind: partial(bench.run, length, arguments.new_tokens) for kind, bench in benches.items()},
                arguments.repeats,
                arguments.seconds,
            )
            rows = [
                report(configs[kind], arguments.batch, length, arguments.new_tokens, itemsize, found, ceilings, devices)
                for kind, found in runs.items()
            ]
            add(rows, length)

    def add(rows, length: int) -> None:
        result["rows"] += rows
        for row in rows:
            print_row(row)
        compared = comparison([row for row in result["rows"] if row["tokens"] == length])
        if compared is not None:
            result["comparisons"][str(length)] = compared
            print(f"{length:9d} tokens:", ", ".join(f"{name} {value:.3f}" for name, value in compared.items()))
        name = "inference" if devices == 1 else f"inference_x{devices}"
        print(f"written to {write(name, result, arguments.results)}", file=sys.stderr, flush=True)

    def fits(length: int, caches: int) -> bool:
        tokens = arguments.batch * (length + arguments.new_tokens)
        return weight_bytes(config) + caches * cache_bytes(config, tokens, 2) / devices < arguments.memory

    # The engines of both kinds have a cache each.
    plain = [n for n in lengths if fits(n, 2) and n <= arguments.longest_full]
    long = [n for n in lengths if n not in plain]
    if plain:
        measure(plain, KIND_NAMES, None, 2)
    for length in long:
        alone = fits(length, 1)
        measure([length], ("orthros",), *((None, 2) if alone else ("int8", 1)))
        if alone and length <= arguments.longest_full:
            measure([length], ("transformer",), None, 2)
            continue
        full = layer_estimate(
            configs["transformer"], weights["transformer"], length, chunk, arguments.batch, devices=devices
        )
        add([full], length)


def print_row(row: dict[str, Any]) -> None:
    text = f"{row['kind']:12s} {row['tokens']:8d}: first token {row['first_token_seconds']:8.3f} s"
    if "is_estimate" in row:
        print(f"{text} by layers, {row['tflops_per_device']:.0f} TFLOP/s a device")
        return
    print(
        f"{text} ({row['first_token_lowest']:.3f} - {row['first_token_highest']:.3f}), "
        f"{row['tflops_per_device']:.0f} TFLOP/s a device, "
        f"floor {row['first_token_floor']:.0%}; decode {row['decode_step_ms']:.2f} ms, "
        f"{row['decode_tokens_per_second']:.1f} tokens/s, floor {row['decode_floor']:.0%}; "
        f"end to end {row['end_to_end_seconds']:.3f} s; peak {row['peak_gib']:.1f} GiB; {row['runs']} runs"
    )


if __name__ == "__main__":
    main()
