"""What every result says about its origin, and where it is kept."""

import json
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def facts(benchmark: str, arguments: Sequence[str], distributions: Sequence[str]) -> dict[str, Any]:
    """Where, when and with what this is measured; of the distributions, the versions of those that are installed."""
    import jax

    return {
        "device": jax.devices()[0].device_kind,
        "driver": driver(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *arguments]),
        "versions": {name: found for name in ("jax", "jaxlib", *distributions) if (found := installed(name))},
    }


def write(benchmark: str, result: dict[str, Any], folder: Path) -> Path:
    """Writes the result to BENCHMARK_DEVICE.json in the folder, which is made."""
    path = result_file(benchmark, result["device"], folder)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def result_file(benchmark: str, device: str, folder: Path) -> Path:
    return folder / f"{benchmark}_{''.join(c if c.isalnum() else '_' for c in device).strip('_')}.json"


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def driver() -> str | None:
    """Version of the NVIDIA driver, or None without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
