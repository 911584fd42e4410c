"""Where the device's time goes: kernels of a recorded profile, added up by kind."""

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import jax

# The first pattern that fits a kernel's instruction (its text, then its place in the program) decides.
COLLECTIVES = "collectives"
KINDS = {
    COLLECTIVES: r"nccl",
    "loss head": r"loss_head",
    "attention": r"mosaic_gpu|cudnn|flash",
    "matrix products": r"__cublas|__triton_gemm|gemm_fusion",
    "optimizer": r"/optimizer/",
    "SwiGLU": r"gated",
    "RoPE": r"apply_rope",
    "scale-offset": r"specialise",
    "norms": r"normalise",
    "copies": r" copy\(|[Mm]emcpy",
}


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[Path]:
    """Records what the devices do inside the block, to be read by `account` afterwards."""
    with jax.profiler.trace(str(folder)):
        yield folder


def account(folder: Path, program: str, steps: int) -> dict[str, float]:
    """Milliseconds a step by kind of kernel, mean of this process's devices, and the largest kernels of no kind.

    Kernels of several streams can run at once: "collectives alone" is the time in which nothing but a collective runs,
    "no kernel runs" that in which nothing does.

    Args:
      folder: of `recorded`.
      program: text of the compiled program.
      steps: number of steps recorded.
    """
    (file,) = folder.rglob("*.xplane.pb")
    places = instruction_texts(program)
    total: dict[str, float] = defaultdict(float)
    devices = 0
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if "GPU" not in plane.name:
            continue
        events: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                found = kind(event.name, places.get(str(dict(event.stats).get("hlo_op", "")), ""))
                total[found] += event.duration_ns
                events[found == COLLECTIVES].append((event.start_ns, event.start_ns + event.duration_ns))
        both = events[False] + events[True]
        if not both:
            continue
        devices += 1
        busy = covered(both)
        total["no kernel runs"] += max(end for _, end in both) - min(start for start, _ in both) - busy
        if events[True]:
            total["collectives alone"] += busy - covered(events[False])
    ordered = sorted(total.items(), key=lambda item: -item[1])
    return {name: nanoseconds / 1e6 / steps / devices for name, nanoseconds in ordered}


def kind(kernel: str, instruction: str) -> str:
    for name, pattern in KINDS.items():
        if re.search(pattern, instruction) or re.search(pattern, kernel):
            return name
    if re.search(r"nvjet|gemm|cutlass|xmma", kernel):
        return "matrix products"
    return "other: " + re.sub(r"[._]?\d+", "", kernel)[:40]


def instruction_texts(program: str) -> dict[str, str]:
    """Text of each instruction of a program by its name; that of a fusion with what is fused."""
    texts: dict[str, str] = {}
    bodies: dict[str, str] = {}
    for found in re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}", program, re.MULTILINE | re.DOTALL):
        bodies[found[1]] = found[2]
    for body in bodies.values():
        for line in body.splitlines():
            if found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line):
                called = re.search(r"calls=%?([\w.\-]+)", line)
                texts[found[1]] = line + (bodies.get(called[1], "") if called else "")
    return texts


def covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
