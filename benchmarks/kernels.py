"""Speed of the attention kernels beside their peers: python -m benchmarks.kernels [--shape NAME ...] [--repeats 5].

Needs an NVIDIA GPU; the shapes tiny, tiny_packed and tiny_decode run anywhere. Our kernels must first be right at
each shape: if one is not, the benchmark ends with exit code 1 and no speed of that shape. Peers that are not
installed, or fail, are named with the reason.

A time is the wall time of 20 calls in a row (fewer where they would take longer than 0.1 s), divided by their number:
the median of several such times, taken in turns by all the programs of a case. TFLOP/s count the visible pairs of
query and key alone, GB/s the bytes that must be moved. "peers" is the time over that of the best composition of
peers: for both streams, the best full attention and the best window attention of any peer. "floor" is the share of
the time that the operations, or the bytes, need at the ceilings.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.candidates import (
    PEERS,
    Arrays,
    Candidate,
    Program,
    decode_candidates,
    decode_layouts,
    decode_program,
    training_candidates,
    training_program,
)
from benchmarks.parity import OURS, Reference, in_float32, violations
from benchmarks.parity import PEERS as PEERS_FACTOR
from benchmarks.record import RESULTS, facts, write
from benchmarks.shapes import ROWS, SHAPES, STREAMS, TINY_SHAPES, Cost, Shape, TrainingShape

CALLS, SECONDS = 20, 0.1
"""Calls of one measurement, and how long it may take."""


class WrongResult(Exception):
    """One of our kernels breaks the numerics rule."""


@dataclass(frozen=True)
class Task:
    """One pass of one case of a shape, and the programs that do it."""

    case: str
    passes: str  # "fwd" or "fwd+bwd"
    cost: Cost
    parts: tuple[str, ...]  # cases whose best peers do the same together
    candidates: list[Candidate]

    @property
    def label(self) -> str:
        return f"{self.case} {self.passes}"

    @property
    def peers(self) -> set[str]:
        return {candidate.name for candidate in self.candidates if candidate.is_peer}


@dataclass(frozen=True)
class Ceilings:
    operations: float  # a second
    bytes: float  # a second

    def floor(self, cost: Cost) -> float:
        """Seconds that the cost takes at least."""
        return max(cost.operations / self.operations, cost.bytes / self.bytes)


def main(argv: list[str] | None = None) -> None:
    shapes = SHAPES | TINY_SHAPES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", nargs="+", choices=shapes, default=list(SHAPES), metavar="NAME", help=f"any of {', '.join(shapes)}"
    )
    parser.add_argument("--repeats", type=int, default=5, help="times taken of each program (default: 5)")
    for name, ceiling in (("operations", 790e12), ("bytes", 4.3e12)):
        text = f"ceiling of the floor (default: {ceiling:.3g}, an H200's)"
        parser.add_argument(f"--{name}-per-second", type=float, default=ceiling, help=text)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if jax.default_backend() != "gpu" and not set(arguments.shape) <= set(TINY_SHAPES):
        parser.error(f"these shapes need an NVIDIA GPU; without one, --shape takes {', '.join(TINY_SHAPES)}")
    ceilings = Ceilings(arguments.operations_per_second, arguments.bytes_per_second)
    result = facts("kernels", sys.argv[1:] if argv is None else argv, PEERS) | {
        "repeats": arguments.repeats,
        "ceilings": {"assumed": asdict(ceilings), "measured": asdict(measured_ceilings(arguments.repeats))},
        "shapes": {},
    }
    print_facts(result)
    for name in arguments.shape:
        try:
            found = benchmark(shapes[name], arguments.repeats, ceilings)
        except WrongResult as error:
            sys.exit(f"{name}: {error}\nNo speed is reported for kernels with wrong results.")
        result["shapes"][name] = found
        print_shape(name, found)
        # After each shape, so that a run that is cut off has written what it measured.
        print(f"written to {write('kernels', result, arguments.results)}", file=sys.stderr)


def benchmark(shape: Shape, repeats: int, ceilings: Ceilings) -> dict[str, Any]:
    """Checks and times every program of a shape.

    Raises:
        WrongResult: one of our kernels breaks the numerics rule.
    """
    stages = {"start": time.perf_counter()}
    inputs = shape.inputs() if isinstance(shape, TrainingShape) else decode_layouts(shape.inputs())
    tasks = tasks_of(shape)
    programs: dict[tuple[str, str], Program] = {(t.label, c.name): c.program for t in tasks for c in t.candidates}
    for case, program in reference_programs(shape).items():
        programs |= {(case, "truth"): in_float32(program), (case, "yardstick"): program}
    compiled = compile_all(programs, inputs)
    stages["compile"] = time.perf_counter()
    references = {
        case: Reference(_run(compiled[case, "truth"], inputs), _run(compiled[case, "yardstick"], inputs))
        for case in reference_programs(shape)
    }
    runs: dict[str, dict[str, Callable[[], Any]]] = {task.label: {} for task in tasks}
    not_run: dict[str, list[str]] = {}
    for task in tasks:
        for candidate in task.candidates:
            program = compiled[task.label, candidate.name]
            reason = why_not(candidate, program, inputs, references[task.case])
            if reason is None:
                runs[task.label][candidate.name] = partial(program, inputs)
            else:
                not_run.setdefault(f"{candidate.name}: {reason}", []).append(task.label)
    stages["check"] = time.perf_counter()
    seconds = {task.label: alternate(runs[task.label], repeats) for task in tasks}
    stages["time"] = time.perf_counter()
    return {
        "shape": asdict(shape),
        "rows": table(tasks, seconds, ceilings),
        "not_run": not_run,
        "wall_seconds": {name: stages[name] - stages[before] for before, name in pairwise(stages)},
    }


def tasks_of(shape: Shape) -> list[Task]:
    if not isinstance(shape, TrainingShape):
        return [
            Task(case, "fwd", shape.cost(rows), ("one row",), list(decode_candidates(shape, case)))
            for case, rows in ROWS.items()
        ]
    return [
        Task(
            case,
            passes,
            shape.cost(streams, gradients),
            ("full", "window") if case == "both" else (case,),
            list(training_candidates(shape, case, gradients)),
        )
        for case, streams in STREAMS.items()
        for passes, gradients in (("fwd", False), ("fwd+bwd", True))
    ]


def reference_programs(shape: Shape) -> dict[str, Program]:
    """By case, the XLA program whose results are those of every pass of the case."""
    if isinstance(shape, TrainingShape):
        return {case: training_program(shape, case, gradients=True) for case in STREAMS}
    return {case: decode_program(shape, case) for case in ROWS}


def compile_all(programs: dict[Any, Program], inputs: Arrays) -> dict[Any, Any]:
    """Each program compiled for the inputs, or what went wrong; traced in turn, compiled in parallel."""
    compiled: dict[Any, Any] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for key, program in programs.items():
            try:
                compiled[key] = pool.submit(jax.jit(program).lower(inputs).compile)
            except Exception as error:
                compiled[key] = error
    return {
        key: found if isinstance(found, Exception) else found.exception() or found.result()
        for key, found in compiled.items()
    }


def why_not(candidate: Candidate, compiled, inputs: Arrays, reference: Reference) -> str | None:
    """Why a program cannot be timed, in one line, or None if it runs and its results are right.

    Raises:
        WrongResult: it is one of ours, supports the call, and fails or has wrong results.
    """
    try:
        found = _run(compiled, inputs)
    except Exception as error:
        if not candidate.is_peer and not isinstance(error, NotImplementedError):
            raise WrongResult(f"{candidate.name} failed: {error!r}") from error
        # Of a refusal the reason is enough: the line names the program and the case.
        reason = str(error).partition("is not possible here: ")[2] or f"{type(error).__name__}: {error}"
        return reason.splitlines()[0][:200]
    wrong = violations(found, reference, PEERS_FACTOR if candidate.is_peer else OURS)
    if wrong and not candidate.is_peer:
        raise WrongResult(f"{candidate.name} breaks the numerics rule: {'; '.join(wrong)}")
    return f"wrong results: {'; '.join(wrong)}" if wrong else None


def _run(compiled, inputs: Arrays) -> Arrays:
    if isinstance(compiled, Exception):
        raise compiled
    return jax.block_until_ready(compiled(inputs))


def alternate(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds a call of each function, `repeats` times, taken in turns so that a drift of the machine meets all."""
    for run in runs.values():
        seconds_a_call(run, 1)
    calls = {name: max(1, min(CALLS, int(SECONDS / seconds_a_call(run, 1)))) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(seconds_a_call(run, calls[name]))
    return times


def seconds_a_call(run: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


Seconds = dict[str, dict[str, list[float]]]
"""Seconds a call, by label of the task and name of the candidate."""


def table(tasks: list[Task], seconds: Seconds, ceilings: Ceilings) -> list[dict[str, Any]]:
    """The rows of the report, the fastest of each task first, with the best peers where they do it in other cases."""
    rows = []
    for task in tasks:
        best_name, best = best_composition(task, tasks, seconds)
        found = dict(seconds[task.label])
        if task.parts != (task.case,) and best is not None:
            found[f"best peers: {best_name}"] = [best]
        for name, times in sorted(found.items(), key=lambda item: statistics.median(item[1])):
            median = statistics.median(times)
            rows.append(
                {
                    "case": task.label,
                    "candidate": name,
                    "ms": median * 1e3,
                    "lowest_ms": min(times) * 1e3,
                    "highest_ms": max(times) * 1e3,
                    "tflops": task.cost.operations / median / 1e12,
                    "gbps": task.cost.bytes / median / 1e9,
                    "time_over_best_peers": None if best is None else median / best,
                    "floor_over_time": ceilings.floor(task.cost) / median,
                }
            )
    return rows


def best_composition(task: Task, tasks: list[Task], seconds: Seconds) -> tuple[str, float | None]:
    """Names and total of the fastest peers that do the parts of a task; no total where a part has no peer."""
    names, total = [], 0.0
    for part in task.parts:
        peer_task = next(t for t in tasks if t.case == part and t.passes == task.passes)
        medians = {
            name: statistics.median(times)
            for name, times in seconds[peer_task.label].items()
            if name in peer_task.peers
        }
        if not medians:
            return "", None
        best = min(medians, key=medians.__getitem__)
        names.append(f"{best} ({part})")
        total += medians[best]
    return " + ".join(names), total


def measured_ceilings(repeats: int) -> Ceilings:
    """What a large bfloat16 matrix product and a copy within the device's memory reach here."""
    size = 8192 if jax.default_backend() == "gpu" else 256
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    source = jnp.ones((8 * size, size), jnp.bfloat16)
    product, copy = (jax.jit(f) for f in (jnp.matmul, jnp.copy))
    times = alternate({"product": lambda: product(a, b), "copy": lambda: copy(source)}, repeats)
    seconds = {name: statistics.median(found) for name, found in times.items()}
    return Ceilings(2 * size**3 / seconds["product"], 2 * source.nbytes / seconds["copy"])


def print_facts(result: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {found}" for name, found in result["versions"].items())
    print(f"{result['device']}, driver {result['driver']}, {result['date']}, commit {result['commit']}; {versions}")
    for name, found in result["ceilings"].items():
        print(f"ceilings {name}: {found['operations'] / 1e12:.0f} TFLOP/s, {found['bytes'] / 1e12:.2f} TB/s")


def print_shape(name: str, found: dict[str, Any]) -> None:
    sizes = ", ".join(f"{key} {value}" for key, value in found["shape"].items() if value is not None)
    print(f"\n{name}: {sizes}")
    print(f"{'case':16s} {'candidate':44s} {'ms':>9s} {'TFLOP/s':>8s} {'GB/s':>7s} {'peers':>7s} {'floor':>6s}")
    for row in found["rows"]:
        over = row["time_over_best_peers"]
        print(
            f"{row['case']:16s} {row['candidate']:44s} {row['ms']:9.4f} {row['tflops']:8.1f} {row['gbps']:7.0f} "
            f"{'-' if over is None else f'{over:.3f}':>7s} {row['floor_over_time']:6.1%}"
        )
    for reason, labels in found["not_run"].items():
        print(f"not run: {reason} ({', '.join(labels)})")
    print("seconds:", ", ".join(f"{stage} {value:.0f}" for stage, value in found["wall_seconds"].items()), flush=True)


if __name__ == "__main__":
    main()
