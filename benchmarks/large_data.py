"""The loader on a data set of 100B tokens: python -m benchmarks.large_data [--tokens 100e9] [--seconds 60].

The data set has the files that `prepare` writes, with as many documents as real text has: their lengths are drawn from
a log-normal distribution with a mean of 1000 tokens. The token files are sparse, so that the disk needs 0.8 GB and not
200 GB; every token is 0, and reading them costs memory traffic and system calls but no disk. The offsets are written
and then dropped from the page cache.

Measured, in shuffled batches of 64 windows of 2049 tokens: the time from opening to the first batch where a run starts
and where it resumes in the middle and at the end of the data set, the tokens per second from there on, and how much the
memory of the process grows meanwhile. The result is results/large_data_DEVICE.json.
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import BATCH, LENGTH, cpu_name
from benchmarks.record import RESULTS, facts, write
from orthros_jax.config import DataConfig
from orthros_jax.data.dataset import TokenDataset
from orthros_jax.data.loader import training_batches
from orthros_jax.data.parts import token_dtype
from orthros_jax.data.storage import FORMAT, INDEX_FILE, OFFSET_DTYPE, SPLITS, VERSION, write_json

MEAN_DOCUMENT = 1000
# As many as the files of fineweb-edu's sample of 100B tokens.
SHARDS = 140
VOCABULARY = 32_000


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=100e9, help="size of the data set (default: 100e9)")
    parser.add_argument("--shards", type=int, default=SHARDS, help=f"files that it is cut into (default: {SHARDS})")
    parser.add_argument("--seconds", type=float, default=60, help="time of reading at each position (default: 60)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_sparse(Path(folder) / "set", int(options.tokens), options.shards)
        measured = measure(Path(folder) / "set", options.seconds)
    result = {
        **facts(
            "large_data", [x for x in arguments if x not in ("--results", str(options.results))], ("grain", "numpy")
        ),
        "device": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        **measured,
    }
    print(json.dumps(measured, indent=1))
    print(f"written to {write('large_data', result, options.results)}", file=sys.stderr)


def write_sparse(folder: Path, tokens: int, shards: int) -> None:
    """Makes a data set of `tokens` tokens, all 0, in documents of random lengths."""
    folder.mkdir()
    random = np.random.default_rng(0)
    dtype = np.dtype(token_dtype(VOCABULARY))
    described = []
    for number, size in enumerate(np.diff(np.linspace(0, tokens, shards + 1).astype(int)).tolist()):
        # The mean of a log-normal distribution is exp(mu + sigma^2 / 2).
        lengths = random.lognormal(np.log(MEAN_DOCUMENT) - 0.5, 1.0, 2 * size // MEAN_DOCUMENT + 2)
        ends = np.maximum(lengths, 2).astype(OFFSET_DTYPE).cumsum()
        ends = np.append(ends[ends < size], size).astype(OFFSET_DTYPE)
        stem = f"train-{number:05d}"
        with (folder / f"{stem}.tokens").open("wb") as file:
            file.truncate(size * dtype.itemsize)
        with (folder / f"{stem}.offsets").open("wb") as file:
            ends.tofile(file)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        described.append({"name": stem, "tokens": size, "documents": len(ends), "text_bytes": 4 * size})
    totals = {key: sum(shard[key] for shard in described) for key in ("tokens", "documents", "text_bytes")}
    empty = {"tokens": 0, "documents": 0, "text_bytes": 0, "shards": []}
    tokenizer = {"name": "none", "fingerprint": "none", "vocab_size": VOCABULARY, "bos_id": None, "eos_id": None}
    index = {
        **{"format": FORMAT, "version": VERSION, "tokenizer": tokenizer, "bos": False, "eos": False},
        **{"dtype": token_dtype(VOCABULARY), "skipped": {}},
        "splits": dict(zip(SPLITS, ({**totals, "shards": described}, empty), strict=True)),
    }
    write_json(folder / INDEX_FILE, index)


def measure(folder: Path, seconds: float) -> dict[str, Any]:
    """Reads from three positions for `seconds` each; sizes in tokens and MiB."""
    data = DataConfig(paths=[str(folder)], sequence_length=LENGTH)
    before = resident_mib("VmRSS")
    dataset = TokenDataset(folder, "train", LENGTH)
    windows = len(dataset)
    positions = {}
    for name, start in {"start": 0, "middle": windows // 2, "end": windows - BATCH}.items():
        opened = time.perf_counter()
        with contextlib.closing(training_batches(data, batch_size=BATCH, seed=0, start_sample=start)) as batches:
            next(batches)
            first = time.perf_counter()
            read = 0
            while time.perf_counter() - first < seconds:
                read += next(batches)["tokens"].size
            rate = read / (time.perf_counter() - first)
        positions[name] = {"first_batch_seconds": first - opened, "tokens_per_second": rate, "tokens_read": read}
        print(f"{name}: first batch after {first - opened:.2f} s, then {rate / 1e6:.1f} M tokens/s", flush=True)
    return {
        "tokens": dataset.tokens,
        "documents": dataset.documents,
        "windows": windows,
        "resident_mib_before": before,
        "resident_mib_growth": resident_mib("VmHWM") - before,
        "positions": positions,
    }


def resident_mib(name: str) -> float:
    """Resident memory of this process now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(kib) / 1024


if __name__ == "__main__":
    main()
