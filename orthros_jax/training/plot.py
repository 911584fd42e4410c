"""`python -m orthros_jax plot RUN...`: loss curves of runs in one picture."""

import argparse
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from orthros_jax.errors import UserError
from orthros_jax.training.metrics import read_metrics

_PANELS = {"tokens": "training tokens", "flops": "training FLOPs"}


def main(argv: list[str]) -> None:
    """Parses the command line, draws and says where the picture is.

    Raises:
      UserError: a run without metrics, or matplotlib is absent.
    """
    parser = argparse.ArgumentParser(
        prog="python -m orthros_jax plot",
        description="Draw training and held-out loss against tokens and FLOPs.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or a metrics.jsonl file")
    parser.add_argument("--output", default="loss.png", help="picture to write (default: %(default)s)")
    arguments = parser.parse_args(argv)
    without_flops = draw(arguments.runs, arguments.output)
    for run in without_flops:
        print(f"{run} has no FLOPs in its metrics.jsonl: it is absent from the right panel")
    print(f"wrote {arguments.output}")


def draw(runs: list[str], output: str | os.PathLike) -> list[str]:
    """Draws the loss of each run against tokens (left) and FLOPs (right); returns the runs without FLOPs.

    The thin line is the training loss as reported, the thick one its running average, markers the held-out
    loss.

    Raises:
      UserError: as in `main`.
    """
    output = Path(output)
    if not output.name:
        raise UserError(f"cannot write the picture {output}: name a file")
    lines_by_run = {run: _read_run(run) for run in runs}
    labels = dict(zip(lines_by_run, _labels(list(lines_by_run)), strict=True))
    plt = _import_pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for number, (run, lines) in enumerate(lines_by_run.items()):
        for axis, key in zip(axes, _PANELS, strict=True):
            _draw_run(axis, lines, key, labels[run], f"C{number}")
    for axis, (key, title) in zip(axes, _PANELS.items(), strict=True):
        axis.set_xlabel(title)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if not axis.lines:
            axis.text(0.5, 0.5, f"no {key} in metrics.jsonl", transform=axis.transAxes, ha="center", color="gray")
            axis.set_xticks([])
    axes[0].xaxis.set_major_formatter(lambda tokens, _: _short(tokens))
    axes[0].set_ylabel("loss (nats per token)")
    axes[0].set_ylim(*_loss_range(lines_by_run.values()))
    axes[0].legend(frameon=False, fontsize="small")
    # The type follows from the name's ending, so the part beside the picture keeps it.
    beside = output.with_name(f".{output.stem}.part{output.suffix or '.png'}")
    try:
        figure.savefig(beside, dpi=150)
        beside.replace(output)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write the picture {output}: {error}") from error
    finally:
        plt.close(figure)
        beside.unlink(missing_ok=True)
    return [run for run, lines in lines_by_run.items() if not len(_curve(lines, "flops", "loss")[0])]


def _read_run(run: str) -> list[dict]:
    path = Path(run)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"{run} is not a run: {path} does not exist; give the run_dir of a training run")
    lines = read_metrics(path)
    if not any(_numbers(line, "tokens", "loss") for line in lines):
        raise UserError(f"{path} holds no training loss yet; wait for the run's first report or leave it out")
    # A line of an evaluation may leave out what the line of the training step before it says.
    seen: dict = {}
    for line in lines:
        seen |= {key: line[key] for key in _PANELS if _numbers(line, key)}
        line |= seen
    return lines


def _labels(runs: list[str]) -> list[str]:
    """The shortest endings of the paths that tell the runs apart and that matplotlib puts into a legend."""
    parts = [Path(run).absolute().parts for run in runs]
    parts = [p[:-1] if p[-1] == "metrics.jsonl" else p for p in parts]
    depth = 1
    while depth < max(map(len, parts)) and (
        len({p[-depth:] for p in parts}) < len(runs) or any(p[-depth:][0].startswith("_") for p in parts)
    ):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def _short(tokens: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(tokens) >= size:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:g}"


def _numbers(line: dict, *keys: str) -> bool:
    return all(isinstance(line.get(key), int | float) and math.isfinite(line[key]) for key in keys)


def _curve(lines: list[dict], x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(line[x], line[y]) for line in lines if _numbers(line, x, y)]
    return np.array([p[0] for p in points], float), np.array([p[1] for p in points], float)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a window of 1/50 of the curve, cut off at its ends."""
    half = max(len(values) // 100, 1)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first, last = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def _draw_run(axis: Any, lines: list[dict], key: str, label: str, color: str) -> None:
    x, loss = _curve(lines, key, "loss")
    if len(x):
        axis.plot(x, loss, color=color, linewidth=0.6, alpha=0.25, zorder=1)
        axis.plot(x, _smooth(loss), color=color, linewidth=1.6, label=label)
    x, loss = _curve(lines, key, "eval_loss")
    if len(x):
        axis.plot(
            x,
            loss,
            color=color,
            linestyle="--",
            linewidth=1,
            marker="o",
            markersize=5,
            markeredgecolor="white",
        )
        final = f"{label}, held out: {loss[-1]:.3f} at the end"
        axis.plot([], [], color=color, linestyle="--", linewidth=1, marker="o", markersize=5, label=final)


def _loss_range(runs: Any) -> tuple[float, float]:
    """Limits that leave out the first steps' high loss, which would flatten the rest."""
    losses = [_curve(lines, "tokens", key)[1] for lines in runs for key in ("loss", "eval_loss")]
    low = min(loss.min() for loss in losses if len(loss))
    high = max(np.quantile(loss, 0.97) for loss in losses if len(loss))
    margin = 0.05 * max(high - low, 0.1)
    return low - margin, high + margin


def _import_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("plot needs matplotlib; run `pip install matplotlib`") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
