"""Kills a run again and again: python -m benchmarks.soak [--hours 2] [--seed N] [--section.key value ...].

First the run is made without interruption. Then it is started anew and again, each time with SIGKILL or SIGTERM at a
random moment of what a whole run takes, start-up and compiling included; where it is complete before, it begins afresh
in another folder. Each complete run must have the numbers of the uninterrupted one to the bit, and leave no temporary
file and no process behind. The resident memory of the uninterrupted run must not grow in its second half.

The seed of the moments is printed. Without --config it is the run of configs/quickstart.yaml. The result is
results/soak_DEVICE.json; a failure ends the command with its reason and exit code 1, and keeps the folder.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# What differs from one start of a run to the next in metrics.jsonl.
TIMES = (
    *("tokens_per_second", "step_seconds", "data_wait_seconds", "save_seconds", "restore_seconds"),
    *("goodput", "peak_memory_gib", "mfu"),
)
# Longest that a process may go on after SIGTERM, and a run when it is left alone after its kills.
_PATIENCE = 300.0
_GROWTH_MIB = 64.0


class SoakFailed(Exception):
    """The message says which run differs, and in what."""


class Soak(NamedTuple):
    """What has happened.

    Attributes:
      whole_seconds: time of the uninterrupted run.
      resident_mib: its resident memory in its second half, once a second.
      record: a line for each start.
      kills: starts by the signal that ended them.
      runs: complete runs that were compared.
    """

    whole_seconds: float
    resident_mib: list[float]
    record: list[str]
    kills: Counter
    runs: int


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "configs" / "quickstart.yaml"), help="settings of the run")
    parser.add_argument("--hours", type=float, default=2.0, help="time after which no run is killed (default: 2)")
    parser.add_argument("--seed", type=int, help="seed of the moments (default: another one each time)")
    parser.add_argument("--results", type=Path, help="folder of the result (default: benchmarks/results)")
    options, overrides = parser.parse_known_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {seed}, logs and runs in {folder}", flush=True)

    def command(name: str) -> list[str]:
        return ["--config", options.config, *overrides, "--run_dir", str(folder / name)]

    deadline = time.monotonic() + 3600 * options.hours
    try:
        found = soak(command, folder, seed, enough=lambda kills: time.monotonic() > deadline, report=print)
    except SoakFailed as error:
        print(f"benchmarks.soak: {error}; see {folder}", file=sys.stderr)
        return 1
    from benchmarks.record import RESULTS, facts, write

    recorded = [x for x in arguments if x not in ("--results", str(options.results))]
    result = {
        **facts("soak", recorded, ("flax", "orbax-checkpoint", "grain")),
        **{"seed": seed, "kills": dict(found.kills), "runs": found.runs, "whole_seconds": found.whole_seconds},
        "resident_mib": [min(found.resident_mib), max(found.resident_mib)],
    }
    print(f"{found.kills.total()} kills, {found.runs} complete runs without a difference")
    print(f"written to {write('soak', result, options.results or RESULTS)}", file=sys.stderr)
    return 0


def soak(
    command: Callable[[str], Sequence[str]],
    folder: Path,
    seed: int,
    *,
    enough: Callable[[int], bool],
    signals: Sequence[signal.Signals] = (signal.SIGKILL, signal.SIGTERM),
    environment: Mapping[str, str] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Soak:
    """Makes a run whole, then kills runs until `enough` of the number of kills, and the last one to be complete.

    A kill loses the steps since the last save, so each start is given what is left of a whole run's time: a moment is
    drawn from it, and where the process ends before, the run is complete and starts anew in another folder.

    Args:
      command: arguments of train.py for the run of a name, whose folder must be `folder`/name.
      folder: gets the runs and a log of each.

    Raises:
      SoakFailed: a run differs, leaves something behind, or ends with an error.
    """
    draw = random.Random(seed)
    began = time.monotonic()
    resident = _watched(_start(command("whole"), folder / "whole.log", environment), folder / "whole.log")
    whole_seconds = time.monotonic() - began
    report(f"a whole run takes {whole_seconds:.1f} s")
    expected = numbers(folder / "whole")
    later = resident[len(resident) // 2 :]
    quarter = len(later) // 2
    if quarter and statistics.median(later[-quarter:]) - statistics.median(later[:quarter]) > _GROWTH_MIB:
        raise SoakFailed(f"resident memory grows: {', '.join(f'{size:.0f}' for size in later)} MiB, once a second")
    kills, runs, record, is_complete = Counter(), 0, [], True
    while not is_complete or not enough(kills.total()):
        name = f"killed-{runs}"
        last = enough(kills.total())
        moment = _PATIENCE + 2 * whole_seconds if last else draw.uniform(0, whole_seconds)
        number = draw.choice(signals)
        log = folder / f"{name}.log"
        process = _start(command(name), log, environment)
        was_killed = _ended_by(process, moment, number)
        _require_no_process(process.pid, log)
        said = log.read_bytes()
        is_complete = process.returncode == 0 and b"\nComplete: " in said
        if process.returncode not in (0, *([-number] if was_killed else [])):
            raise SoakFailed(f"{name} ended with code {process.returncode}:\n{said.decode(errors='replace')}")
        if was_killed and not is_complete:
            kills[number.name] += 1
            record.append(f"{number.name} after {moment:.1f} s: {_stage(said)}")
        elif is_complete:
            record.append(f"complete within {moment:.1f} s")
            compare(numbers(folder / name), expected, name)
            require_clean(folder / name)
            runs += 1
        else:
            raise SoakFailed(f"{name} ended before its last step:\n{said.decode(errors='replace')}")
        report(record[-1])
    return Soak(whole_seconds, later, record, kills, runs)


def numbers(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl without what differs from one start to the next."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def _start(arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None) -> subprocess.Popen:
    with log.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *arguments],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            # A process group of its own shows whether a process is left.
            start_new_session=True,
        )


def _watched(process: subprocess.Popen, log: Path) -> list[float]:
    """Resident MiB of a process, once a second until it ends well."""
    sizes = []
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            sizes += [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")]
        except OSError:
            break
        time.sleep(1)
    if process.wait() != 0:
        raise SoakFailed(f"the uninterrupted run ended with code {process.returncode}:\n{log.read_text()}")
    return sizes


def _ended_by(process: subprocess.Popen, moment: float, number: signal.Signals) -> bool:
    """Waits for the end; whether a signal was sent to bring it about."""
    try:
        process.wait(moment)
        return False
    except subprocess.TimeoutExpired:
        process.send_signal(number)
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise SoakFailed(f"a run goes on {_PATIENCE:.0f} s after {number.name}") from None
    return True


def _require_no_process(group: int, log: Path) -> None:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return
    raise SoakFailed(f"{log.stem} has left a process behind, in the process group {group}")


def require_clean(run_dir: Path) -> None:
    left = [p for p in run_dir.rglob("*") if "tmp" in p.name or ".partial-" in p.name or p.name.endswith(".damaged")]
    if left:
        raise SoakFailed(f"a complete run has left {', '.join(map(str, left))}")


def compare(found: list[dict], expected: list[dict], name: str) -> None:
    for ours, theirs in zip(found, expected, strict=False):
        if ours != theirs:
            raise SoakFailed(f"{name} differs: {ours} and not {theirs}")
    if len(found) != len(expected):
        raise SoakFailed(f"{name} has {len(found)} lines of metrics and not {len(expected)}")


def _stage(log: bytes) -> str:
    """How far a process came, for the record."""
    if b"Step " in log or b"step " in log:
        return "stepping, saving or evaluating"
    return "compiling" if b"MFU " in log else "starting"


if __name__ == "__main__":
    sys.exit(main())
