"""Speed of preparing and of reading data: python -m benchmarks.data [--cores 2].

A BPE of 32,000 entries is trained on the Python standard library. `source code` encodes that corpus, `prose`
its English: docstrings and the language reference that pydoc ships. As `prepare` does, a process for each core
takes its share of the texts; every other text is encoded before the clock starts, so that the words that a
tokenizer has met are those of a corpus under way. `one part` is one process that makes the shards of all source
code out of parquet, from its first text on. `read` takes shuffled batches of 64 windows of 2049 tokens through
the loader. Each number is the median of several runs. The machine may be shared, so the load average and the
rate per second of processor time are recorded too.
"""

import argparse
import ast
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.record import RESULTS, commit, write

VOCABULARY = 32_000
BATCH, LENGTH = 64, 2048
TARGETS = {"prose": 1.5e6, "source code": 1.5e6, "read": 30e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=2, help="cores to use (default: 2)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each measurement (default: 5)")
    arguments = parser.parse_args()
    # Read by the tokenizer's threads when they start, so before anything encodes.
    os.environ["RAYON_NUM_THREADS"] = "1"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    with tempfile.TemporaryDirectory() as folder:
        rates = measure(Path(folder), arguments.cores, arguments.repeats)
    report(rates, arguments.cores)


@dataclass(frozen=True)
class Rate:
    """Tokens per second of the clock, and per second of processor time over all threads."""

    wall: float
    processor: float


def measure(folder: Path, cores: int, repeats: int) -> dict[str, list[Rate]]:
    """Returns the rates of each run, by measurement."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from orthros_jax.config import DataConfig
    from orthros_jax.data.loader import training_batches
    from orthros_jax.data.parts import Settings, read_texts, write_part
    from orthros_jax.data.prepare import prepare
    from orthros_jax.data.readers import InputFile
    from orthros_jax.data.stdlib import stdlib_files
    from orthros_jax.data.tokenizer import FileTokenizer, train_bpe

    settings = Settings("bpe", None, 0, 1, "text", 0.005, False)
    code = [text for _, text, _ in read_texts(stdlib_files(), settings, Counter())]
    english = prose(code)
    content = train_bpe(code + english, VOCABULARY)
    parquet = folder / "corpus.parquet"
    pq.write_table(pa.table({"text": code}), parquet, row_group_size=100)
    prepare(["python-stdlib"], folder / "set", progress=False)
    data = DataConfig(paths=[str(folder / "set")], sequence_length=LENGTH)
    batches = training_batches(data, batch_size=BATCH, seed=0)

    def write_shards() -> int:
        tokenizer, counts = FileTokenizer(content, "bpe", 0, 1), []
        write_part(0, [InputFile(str(parquet), 0, "")], settings, tokenizer, folder, counts.append)
        return sum(counts)

    def read() -> int:
        return sum(next(batches)["tokens"].size for _ in range(200))

    read()
    rates = {
        name: [rate(run) for _ in range(repeats)] for name, run in {"one part": write_shards, "read": read}.items()
    }
    batches.close()
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        for name, texts in {"prose": english, "source code": code}.items():
            shares = [texts[i::cores] for i in range(cores)]
            runs = [list(pool.map(encode, [content] * cores, shares)) for _ in range(repeats)]
            # The processes run side by side, so their rates add up.
            rates[name] = [Rate(sum(r.wall for r in run), statistics.mean(r.processor for r in run)) for run in runs]
    return rates


def encode(content: bytes, texts: list[str]) -> "Rate":
    """Rate of encoding every second text after the others, by a new tokenizer."""
    from orthros_jax.data.tokenizer import FileTokenizer

    tokenizer = FileTokenizer(content, "bpe", 0, 1)
    tokenizer.encode_batch(texts[::2])
    return rate(lambda: sum(len(ids) for ids in tokenizer.encode_batch(texts[1::2])))


def prose(sources: list[str]) -> list[str]:
    """English that comes with Python: the docstrings of the sources, and pydoc's topics."""
    from pydoc_data.topics import topics

    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    docstrings = (ast.get_docstring(node) for node in nodes if isinstance(node, documented))
    return [*topics.values(), *(text for text in docstrings if text)]


def rate(run: Callable[[], int]) -> Rate:
    wall, processor = time.perf_counter(), time.process_time()
    tokens = run()
    return Rate(tokens / (time.perf_counter() - wall), tokens / (time.process_time() - processor))


def report(rates: dict[str, list[Rate]], cores: int) -> None:
    result = {
        "device": cpu_name(),
        "cores": cores,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("grain", "numpy", "pyarrow", "tokenizers")},
        "commit": commit(),
        "tokens_per_second": {
            name: {
                "median": statistics.median(run.wall for run in runs),
                "lowest": min(run.wall for run in runs),
                "highest": max(run.wall for run in runs),
                "per_processor_second": statistics.median(run.processor for run in runs),
            }
            for name, runs in rates.items()
        },
    }
    print(f"{result['device']}, {cores} cores, load average {result['load_average']:.1f}")
    for name, found in result["tokens_per_second"].items():
        target = f"  (target {TARGETS[name] / 1e6:.1f})" if name in TARGETS else ""
        print(
            f"{name:12s} {found['median'] / 1e6:7.2f} M tokens/s, {found['lowest'] / 1e6:.2f} to "
            f"{found['highest'] / 1e6:.2f}; {found['per_processor_second'] / 1e6:.2f} per processor second"
            f"{target}"
        )
    path = write("data", result, RESULTS)
    print(f"written to {path}", file=sys.stderr)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
