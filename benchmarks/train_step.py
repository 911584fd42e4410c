"""Speed of training: python -m benchmarks.train_step [--config FILE] [--steps 50] [--section.key value ...].

Real steps of a run as the trainer makes them: master weights, AdamW and clipping as configured, packed documents from
the loader, which reads while the steps run, metrics of each step read after the next one is dispatched. Text is made on
the spot, words drawn from a vocabulary of the model's size with documents of random length. Without --config the model
is a tiny one, for a processor without an accelerator.

Tokens per second are those of the steps after the first two. `--profile 3` records three steps more and accounts for
the device's time by kind of kernel. Results are added to results/train_step_DEVICE.json under --name.
"""

import argparse
import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import profile
from benchmarks.record import RESULTS, facts, result_file
from orthros_jax.config import Config
from orthros_jax.config_reader import read_config
from orthros_jax.data.loader import training_batches
from orthros_jax.data.prepare import prepare
from orthros_jax.model.flops import forward_flops
from orthros_jax.sharding import batch_sharding, build_mesh
from orthros_jax.training.compiler import compiler_options, use_device_memory
from orthros_jax.training.lowering import abstract_state, lower_train_step
from orthros_jax.training.metrics import peak_flops_per_second
from orthros_jax.training.step import StepMetrics, make_program, output_rows
from pallas_kernels.dispatch import log_once

_WARM_UP = 2
TINY = """
model: {vocab_size: 300, num_layers: 3, model_dim: 32, num_heads: 2, num_kv_heads: 2, head_dim: 16, ffn_dim: 48}
data: {sequence_length: 64}
training: {batch_size: 8}
"""


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="settings of the run; other settings follow as for train.py")
    parser.add_argument("--name", default="tiny", help="key of the result")
    parser.add_argument("--steps", type=int, default=50, help="timed steps (default: 50)")
    parser.add_argument("--warm_up", type=int, default=_WARM_UP, help=f"steps before them (default: {_WARM_UP})")
    parser.add_argument("--document", type=int, help="tokens of every document (default: random, 10 to 4000)")
    parser.add_argument("--profile", type=int, default=0, help="steps to profile after the timed ones")
    parser.add_argument("--backend", help="attention backend that `auto` must take, for example hopper")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options, overrides = parser.parse_known_args(arguments)
    use_device_memory()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(options.config) if options.config else Path(folder) / "tiny.yaml"
        if not options.config:
            file.write_text(TINY)
        data = ["--data.paths", f"[{folder}/data]"]
        config = read_config(["--config", str(file), *overrides, *data], prog="benchmarks.train_step")
        make_text(Path(folder), config.model.vocab_size, document=options.document)
        result = measure(config, options, Path(folder))
    recorded = [x for x in arguments if x not in ("--results", str(options.results))]
    result |= facts("train_step", recorded, ("flax", "optax", "grain")) | {"devices": jax.device_count()}
    print_result(options.name, result)
    print(f"written to {write(options.name, result, options.results)}")


def make_text(folder: Path, vocabulary: int, tokens: int = 1_000_000, document: int | None = None) -> None:
    """Prepares `folder`/data: words of a Zipf-like distribution, one token each, in documents of 10 to 4000 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"w{number}" for number in range(vocabulary - 3)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *words])}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(6.0, 1.0, tokens // 600), 10, 4000).astype(int)
    if document:
        lengths = np.full(-(-tokens // document), document)
    with (folder / "text.jsonl").open("w") as file:
        for length in lengths:
            drawn = (vocabulary - 3) ** random.random(length)
            text = " ".join(f"w{number}" for number in drawn.astype(int))
            file.write(json.dumps({"text": text}) + "\n")
    source, tokenizer_file = str(folder / "text.jsonl"), str(folder / "tokenizer.json")
    prepare([source], folder / "data", tokenizer=tokenizer_file, holdout=0.0, workers=1, progress=False)


def measure(config: Config, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compiles the train step and times it."""
    mesh = build_mesh(config.mesh)
    messages: list[str] = []
    with jax.set_mesh(mesh), _kernel_log(messages):
        program = make_program(config, config.optimizer.schedule_steps or config.training.steps)
        shardings = jax.tree.map(lambda x: x.sharding, abstract_state(program, mesh))
        state = jax.jit(program.init, out_shardings=shardings)(jax.random.key(config.training.seed))
        started = time.perf_counter()
        compiled = lower_train_step(program, config, mesh, state).compile(compiler_options(mesh))
        compile_seconds = time.perf_counter() - started
        print(f"compiled in {compile_seconds:.0f} s; {'; '.join(messages)}", flush=True)
        if options.backend and not any(f"impl=auto takes {options.backend}" in message for message in messages):
            sys.exit(f"auto did not take {options.backend}: {messages}")
        batches = training_batches(config.data, batch_size=config.training.batch_size, seed=config.training.seed)
        with contextlib.closing(batches):
            state, _, _ = _steps(compiled, state, batches, options.warm_up, mesh)
            state, seconds, metrics = _steps(compiled, state, batches, options.steps, mesh)
            print(f"{options.steps} steps in {sum(seconds):.1f} s", flush=True)
            account = None
            if options.profile:
                with profile.recorded(folder / "profile") as trace:
                    state, _, _ = _steps(compiled, state, batches, options.profile, mesh)
                account = profile.account(trace, compiled.as_text() or "", options.profile)
    rows = config.training.batch_size * config.data.sequence_length
    outputs = config.training.batch_size * output_rows(config)
    forward = forward_flops(config.model)
    operations = statistics.mean(3 * forward.total(rows, outputs, m.context_pairs, m.output_pairs) for m in metrics)
    peak = peak_flops_per_second(mesh.devices.flat[0].device_kind)
    mean = sum(seconds) / len(seconds)
    memory: Any = compiled.memory_analysis()
    statistics_of_device = jax.local_devices()[0].memory_stats() or {}
    return {
        "tokens_per_second": rows / mean,
        "model_tflops": operations / mean / 1e12,
        "mfu": operations / mean / peak / mesh.size if peak else None,
        "step_ms": 1e3 * mean,
        "lowest_step_ms": 1e3 * min(seconds),
        "highest_step_ms": 1e3 * max(seconds),
        "steps": len(seconds),
        "tokens_per_step": rows,
        "documents_per_window": statistics.mean(m.documents for m in metrics) / config.training.batch_size,
        "losses": [m.cross_entropy / m.weight for m in metrics],
        "compile_seconds": compile_seconds,
        "program_gib": (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30,
        "peak_gib": statistics_of_device.get("peak_bytes_in_use", 0) / 2**30 or None,
        "kernels": messages,
        "account_ms_per_step": account,
    }


def _steps(compiled, state, batches, count: int, mesh):
    """Makes steps; each one's metrics are read after the next is dispatched. Seconds are between readings."""
    seconds, read, pending = [], [], None
    before = time.perf_counter()
    for number in range(count + 1):
        dispatched = None
        if number < count:
            sharding = batch_sharding(mesh)
            batch = {k: jax.make_array_from_process_local_data(sharding, x) for k, x in next(batches).items()}
            state, dispatched = compiled(state, batch)
        if pending is not None:
            read.append(StepMetrics(*(x.item() for x in jax.device_get(pending))))
            now = time.perf_counter()
            seconds.append(now - before)
            before = now
        pending = dispatched
    return state, seconds, read


@contextlib.contextmanager
def _kernel_log(messages: list[str]):
    logger = logging.getLogger("pallas_kernels")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    level = logger.level
    # Each choice is logged once a process; this program may not be the first.
    log_once.cache_clear()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def print_result(name: str, result: dict[str, Any]) -> None:
    mfu = "" if result["mfu"] is None else f", MFU {result['mfu']:.1%}"
    print(
        f"{name}: {result['tokens_per_second']:,.0f} tokens/s, {result['model_tflops']:.1f} TFLOP/s{mfu}; step "
        f"{result['step_ms']:.1f} ms ({result['lowest_step_ms']:.1f} to {result['highest_step_ms']:.1f}), "
        f"{result['steps']} steps of {result['tokens_per_step']:,} tokens; program {result['program_gib']:.1f} GiB; "
        f"loss {result['losses'][0]:.4f} to {result['losses'][-1]:.4f}"
    )
    if result["account_ms_per_step"]:
        for kind, milliseconds in result["account_ms_per_step"].items():
            print(f"  {kind:24s} {milliseconds:8.2f} ms a step")


def write(name: str, result: dict[str, Any], folder: Path) -> Path:
    """Adds a result to the file of its device."""
    folder.mkdir(parents=True, exist_ok=True)
    path = result_file("train_step", result["device"], folder)
    results = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(results | {name: result}, indent=1) + os.linesep)
    return path


if __name__ == "__main__":
    main()
