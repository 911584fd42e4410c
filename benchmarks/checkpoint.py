"""What a checkpoint costs: python -m benchmarks.checkpoint [--config FILE] [--folder DIR] [--section.key value ...].

Makes the training state of a configuration on this machine's devices, and real steps on random tokens. Two saves are
made while steps go on, as in training. Of each is measured how long the loop waits in it (the stall), how long until
it is complete, and how long the steps take meanwhile; the stall of the first one includes the compilation of the
checksums. Then the files are dropped from the page cache and the last save is restored, checksums included.

--folder chooses the disk. The batch decides how long a step takes, so with a large model a smaller one will do, for
example --training.batch_size 8 --training.accumulation 1. Without --config the model is a tiny one. The result is
results/checkpoint_DEVICE.json.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.record import RESULTS, facts, write
from benchmarks.train_step import TINY
from orthros_jax.config import Config
from orthros_jax.config_reader import read_config
from orthros_jax.errors import run_command
from orthros_jax.sharding import batch_sharding, build_mesh
from orthros_jax.training.checkpoint import Checkpoints
from orthros_jax.training.compiler import compiler_options, use_device_memory
from orthros_jax.training.lowering import abstract_state, lower_train_step
from orthros_jax.training.step import make_program


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="settings of the run; other settings follow as for train.py")
    parser.add_argument("--folder", help="where to save (default: a temporary folder)")
    parser.add_argument("--steps", type=int, default=5, help="steps to time before the saves (default: 5)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result")
    options, overrides = parser.parse_known_args(arguments)
    use_device_memory()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        file = Path(options.config) if options.config else Path(folder) / "tiny.yaml"
        if not options.config:
            file.write_text(TINY)
        config = read_config(["--config", str(file), *overrides], prog="benchmarks.checkpoint")
        result = measure(config, Path(folder) / "checkpoints", options.steps)
    recorded = [x for x in arguments if x not in ("--results", str(options.results))]
    result |= facts("checkpoint", recorded, ("flax", "orbax-checkpoint", "tensorstore")) | {
        "devices": jax.device_count(),
        "cores": os.cpu_count(),
    }
    print_result(result)
    print(f"written to {write('checkpoint', result, options.results)}", file=sys.stderr)


def measure(config: Config, folder: Path, steps: int) -> dict[str, Any]:
    """Sizes in bytes, times in seconds."""
    mesh = build_mesh(config.mesh)
    with jax.set_mesh(mesh):
        program = make_program(config, config.training.steps)
        target = abstract_state(program, mesh)
        shardings = jax.tree.map(lambda x: x.sharding, target)
        state = jax.jit(program.init, out_shardings=shardings)(jax.random.key(0))
        train_step = lower_train_step(program, config, mesh, state).compile(compiler_options(mesh))
        size = (config.training.batch_size, config.data.sequence_length + 1)
        tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, size, np.int32)
        rows = {"tokens": tokens, "segment_ids": np.ones(size, np.int32)}
        batch = jax.device_put(rows, batch_sharding(mesh))

        def timed_step() -> float:
            nonlocal state
            began = time.perf_counter()
            state, metrics = train_step(state, batch)
            jax.block_until_ready(metrics)
            return time.perf_counter() - began

        timed_step()
        alone = [timed_step() for _ in range(steps)]
        checkpoints = Checkpoints(folder, keep_last=1, keep_every=None)
        saves = []
        for _ in range(2):
            began = time.perf_counter()
            checkpoints.save(int(state.step), state, {})
            stall = time.perf_counter() - began
            with ThreadPoolExecutor(1) as waiting:
                complete = waiting.submit(lambda: (checkpoints.wait(), time.perf_counter())[1])
                meanwhile = [timed_step()]
                while not complete.done():
                    meanwhile.append(timed_step())
            saves.append(
                {
                    "stall_seconds": stall,
                    "complete_seconds": complete.result() - began,
                    "step_seconds_meanwhile": statistics.median(meanwhile),
                    "steps_meanwhile": len(meanwhile),
                }
            )
        checkpoints.close()
        state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
        del state
        file_bytes = drop_from_cache(folder)
        began = time.perf_counter()
        restored = Checkpoints(folder, keep_last=1, keep_every=None).restore(target)
        assert restored is not None
        jax.block_until_ready(restored.state)
        seconds = time.perf_counter() - began
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(target.params)),
        "state_bytes": state_bytes,
        "file_bytes": file_bytes,
        "step_seconds": statistics.median(alone),
        "saves": saves,
        "save_gb_per_second": state_bytes / 1e9 / saves[-1]["complete_seconds"],
        "restore_seconds": seconds,
        "restore_gb_per_second": state_bytes / 1e9 / seconds,
    }


def drop_from_cache(folder: Path) -> int:
    """Makes the next reading of the files come from the disk; returns their bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        # Only pages that are on the disk can be dropped.
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return sum(path.stat().st_size for path in files)


def print_result(result: dict[str, Any]) -> None:
    print(
        f"{result['parameters']:,} parameters, state of {result['state_bytes'] / 1e9:.2f} GB, "
        f"{result['file_bytes'] / 1e9:.2f} GB on disk; a step takes {result['step_seconds']:.3f} s"
    )
    for save in result["saves"]:
        print(
            f"save: the loop waits {save['stall_seconds']:.3f} s, complete after {save['complete_seconds']:.2f} s; "
            f"meanwhile {save['steps_meanwhile']} steps of {save['step_seconds_meanwhile']:.3f} s"
        )
    print(
        f"save {result['save_gb_per_second']:.2f} GB/s; restore {result['restore_seconds']:.2f} s, "
        f"{result['restore_gb_per_second']:.2f} GB/s"
    )


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:], prog="benchmarks.checkpoint"))
