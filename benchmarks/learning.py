"""Kinds of model on the same tokens: python -m benchmarks.learning --data data/debian_docs [--slots 0]

Trains each kind with each seed by `train.py`, from the settings under configs/comparison, one run after the other in
each slot: `--slots 0,0,1,1` makes two at a time on each of GPUs 0 and 1. A run whose folder is there goes on. Then the
held-out loss of each, overall and by position of the row in its document. Results are added to
results/learning_DEVICE.json; `python -m orthros_jax plot` draws the runs' losses.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.record import RESULTS, facts, result_file, write
from orthros_jax import streams
from orthros_jax.config import DataConfig, ModelConfig
from orthros_jax.config_reader import load_config
from orthros_jax.data.loader import evaluation_batches
from orthros_jax.inference.load import open_run
from orthros_jax.model import build_model
from orthros_jax.training.compiler import use_device_memory
from orthros_jax.training.metrics import read_metrics

CONFIGS = Path(__file__).parent.parent / "configs" / "comparison"
KINDS = {
    "orthros": (),
    "orthros without scale-offset": ("--model.query_sharing", "shared"),
    "transformer": ("--model.kind", "transformer"),
    "sliding window 512": ("--model.kind", "sliding_window", "--model.window", "512"),
}
BOUNDS = (0, 64, 256, 512)
"""First positions of the groups of rows whose loss is reported."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="prepared data set")
    parser.add_argument("--sizes", default="42m,110m", help="files under configs/comparison (default: %(default)s)")
    parser.add_argument("--seeds", default="0,1", help="(default: %(default)s)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="(default: all)")
    parser.add_argument("--slots", default="0", help="GPU of each run that is made at a time (default: %(default)s)")
    parser.add_argument("--runs", type=Path, default=Path("runs/comparison"), help="(default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("settings", nargs="*", metavar="-- --section.key value", help="settings of all runs")
    arguments = parser.parse_args(argv)
    runs = [
        (size, kind, int(seed))
        for size in arguments.sizes.split(",")
        for seed in arguments.seeds.split(",")
        for kind in arguments.kinds.split(",")
    ]
    folders = {run: run_folder(arguments.runs, *run) for run in runs}
    commands = {run: command(folders[run], arguments.data, *run, settings=arguments.settings) for run in runs}
    failed = train_all(commands, folders, arguments.slots.split(","))
    use_device_memory()
    rows = [measure(folders[run], *run) for run in runs if run not in failed]
    result = facts("learning", sys.argv[1:] if argv is None else argv, ("flax", "optax", "grain"))
    path = result_file("learning", result["device"], arguments.results)
    rows = merged(json.loads(path.read_text())["rows"] if path.exists() else [], rows)
    print(table(rows))
    print(f"written to {write('learning', result | {'rows': rows}, arguments.results)}")
    if failed:
        sys.exit(f"failed: {', '.join(map(str, failed))}; see log.txt in their folders")


def run_folder(runs: Path, size: str, kind: str, seed: int) -> Path:
    return runs / f"{size}_{kind.replace(' ', '_')}_{seed}"


def command(folder: Path, data: str, size: str, kind: str, seed: int, settings: list[str]) -> list[str]:
    """How a run is started."""
    file = CONFIGS / f"{size}.yaml"
    given = ["--run_dir", str(folder), "--data.paths", f"[{data}]", "--training.seed", str(seed)]
    train = str(CONFIGS.parent.parent / "train.py")
    return [sys.executable, train, "--config", str(file), *given, *KINDS[kind], *settings]


def train_all(commands: dict[Any, list[str]], folders: dict[Any, Path], slots: list[str]) -> list[Any]:
    """Makes the runs, each in the next slot that is free; returns those that failed."""
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for run in commands:
        waiting.put(run)
    failed = []

    def work(device: str) -> None:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": device}
        # Runs that share a device share its memory.
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / slots.count(device):.2f}")
        while True:
            try:
                run = waiting.get_nowait()
            except queue.Empty:
                return
            folders[run].mkdir(parents=True, exist_ok=True)
            with (folders[run] / "log.txt").open("a") as log:
                finished = subprocess.run(commands[run], env=environment, stdout=log, stderr=log, check=False)
            if finished.returncode:
                failed.append(run)
            print(f"{folders[run]}: exit code {finished.returncode}", flush=True)

    threads = [threading.Thread(target=work, args=(device,)) for device in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def measure(folder: Path, size: str, kind: str, seed: int) -> dict[str, Any]:
    """Held-out losses of a finished run, in nats a token, and what it took."""
    config = load_config(folder / "config.yaml")
    stored = open_run(folder)
    entropy, count = losses_by_position(stored.config, stored.read(None), config.data)
    lines = read_metrics(folder / "metrics.jsonl")
    last = [line for line in lines if "tokens" in line][-1]
    ends = (*BOUNDS[1:], len(entropy))
    return {
        "size": size,
        "kind": kind,
        "seed": seed,
        "heldout_loss": entropy.sum() / count.sum(),
        "by_position": [
            {"from": a, "to": b, "rows": int(count[a:b].sum()), "loss": entropy[a:b].sum() / max(count[a:b].sum(), 1)}
            for a, b in zip(BOUNDS, ends, strict=True)
        ],
        "tokens": last["tokens"],
        "flops": last["flops"],
        "curve": [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line],
    }


def losses_by_position(config: ModelConfig, params: dict, data: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the held-out cross-entropy in nats, and numbers of rows, by position in the document, float64 [T]."""
    graph = nnx.split(nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0))), nnx.Param)[0]

    @jax.jit
    def sums(params, tokens, segment_ids):
        layout, targets = streams.pretraining(tokens, segment_ids)
        model = nnx.merge(graph, params)
        log_probability = jax.nn.log_softmax(model.logits(model(layout)).astype(jnp.float32))
        loss = -jnp.take_along_axis(log_probability, targets.labels[..., None], axis=-1)[..., 0]
        zeros = jnp.zeros(data.sequence_length, jnp.float32)
        return tuple(zeros.at[layout.positions].add(x * targets.weights) for x in (loss, jnp.ones_like(loss)))

    batches = evaluation_batches(data, batch_size=8)
    found = [jax.device_get(sums(params, batch["tokens"], batch["segment_ids"])) for batch in batches]
    entropy, count = np.asarray(found, np.float64).sum(axis=0)
    return entropy, count


def merged(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of earlier calls and new ones, which replace those of the same run."""

    def run(row):
        return row["size"], list(KINDS).index(row["kind"]), row["seed"]

    return sorted(({run(row): row for row in (*before, *rows)}).values(), key=run)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line for each size, kind and seed."""
    groups = [f"{group['from']}-{group['to'] - 1}" for group in rows[0]["by_position"]] if rows else []
    lines = [f"| size | model | seed | held-out | {' | '.join(groups)} | FLOPs |", "|---" * (5 + len(groups)) + "|"]
    for row in rows:
        groups = " | ".join(f"{group['loss']:.4f}" for group in row["by_position"])
        lines.append(
            f"| {row['size']} | {row['kind']} | {row['seed']} | {row['heldout_loss']:.4f} | {groups} | "
            f"{row['flops']:.3g} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
