"""Where a run's numbers go: metrics.jsonl always, TensorBoard and Weights & Biases on request."""

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from orthros_jax.config import MetricsConfig
from orthros_jax.errors import UserError

# Dense bfloat16 peak of one device in TFLOP/s, by a part of jax.Device.device_kind; the first match counts.
# Sources: NVIDIA data sheets (half of the figure "with sparsity") and the Cloud TPU system architecture
# pages.
_PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H200 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5": 459.0,
    "TPU v6": 918.0,
}


def peak_flops_per_second(device_kind: str) -> float | None:
    """Dense bfloat16 peak of one device in FLOP/s; None for a CPU or a device that is not in the table."""
    return next((1e12 * tflops for name, tflops in _PEAK_TFLOPS.items() if name in device_kind), None)


class MetricsWriter:
    """Writes one set of numbers a step. Only process 0 writes; on the others every method does nothing.

    metrics.jsonl holds one JSON object a line, flushed as it is written, so that a killed run loses at most
    the line in progress. JSON has no NaN or infinity: such a value becomes null. On resumption lines of later
    steps, and a line torn by a kill, are dropped, so that each step occurs once; TensorBoard is told to do
    the same. Weights & Biases refuses steps that go back: each start of a run is a W&B run of its own, in a
    group named after the folder.

    Args:
      config: which writers are on.
      run_dir: folder of the run; created if absent.
      resume_step: completed steps that the run continues from; 0 for a new run.

    Raises:
      UserError: a writer that is on is not installed.
    """

    def __init__(self, config: MetricsConfig, run_dir: str | os.PathLike, resume_step: int):
        self._file = self._tensorboard = self._wandb = None
        if jax.process_index() != 0:
            return
        run_dir = Path(run_dir)
        if config.wandb != "off":
            self._wandb = _start_wandb(config, run_dir, resume_step)
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        _drop_lines_after(path, resume_step)
        self._file = path.open("a", encoding="utf-8")
        if config.tensorboard:
            from tensorboardX import SummaryWriter

            # Two starts within a second would write the same file but for the suffix.
            self._tensorboard = SummaryWriter(
                str(run_dir / "tensorboard"),
                purge_step=resume_step + 1,
                flush_secs=10,
                filename_suffix=f".{resume_step}",
            )

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the numbers of one step: Python, NumPy or JAX scalars by name."""
        if self._file is None:
            return
        values = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        finite = {name: value if _is_valid_json(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            try:
                self._wandb.log(values, step=step)
            except Exception as error:
                print(f"Weights & Biases failed and is off from here on: {error}", file=sys.stderr, flush=True)
                self._wandb = None

    def close(self) -> None:
        """Flushes and closes all writers."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """The lines of a metrics.jsonl in order, without lines that a kill has torn."""
    lines = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("step"), int):
            lines.append(value)
    return lines


def _is_valid_json(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _drop_lines_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [json.dumps(line) + "\n" for line in read_metrics(path) if line["step"] <= step]
    beside = path.with_name(path.name + ".tmp")
    with beside.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _start_wandb(config: MetricsConfig, run_dir: Path, resume_step: int) -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"metrics.wandb is {config.wandb}, but wandb is not installed; run `pip install wandb` "
            "or set metrics.wandb to off"
        ) from error
    run_dir.mkdir(parents=True, exist_ok=True)
    group = run_dir.absolute().name
    options = {
        "project": config.wandb_project,
        "dir": str(run_dir),
        "group": group,
        "name": f"{group} from step {resume_step}",
    }
    if config.wandb == "online":
        try:
            return wandb.init(mode="online", settings=wandb.Settings(init_timeout=60), **options)
        except Exception as error:
            print(f"Weights & Biases cannot be reached, going on offline: {error}", file=sys.stderr, flush=True)
    return wandb.init(mode="offline", **options)
