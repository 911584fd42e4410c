"""What a compiled program moves and holds, read from its text: collectives with their sizes and groups, and arrays.

The text is HLO as `jax.stages.Compiled.as_text` prints it: one computation after another, an instruction a line. A
computation runs as often as its callers do, the body of a loop as often as the loop turns.
"""

import collections
import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "u4": 1, "s4": 1, "c64": 8}
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)")
_HEADER = re.compile(r"(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{")
_CALLED = re.compile(r"(calls|body|condition|to_apply|called_computations|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)")
# Instructions whose result is no memory of its own.
_VIEWS = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "constant", "call"}


class Array(NamedTuple):
    """Type and shape of one array, with the bytes of an element."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        digits = re.search(r"\d+", self.dtype)
        width = _BYTES.get(self.dtype) or (int(digits[0]) // 8 if digits else 0)
        return self.size * max(width, 1) if self.dtype not in ("token", "opaque") else 0

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Collective(NamedTuple):
    """One collective instruction.

    Attributes:
      kind: one of KINDS.
      arrays: the whole arrays: what is gathered, reduced, exchanged, or before it is scattered.
      axes: mesh axes that its groups span.
      group: devices of a group.
      count: times that a step runs it.
      source: operation of the model that it comes from.
    """

    kind: str
    arrays: tuple[Array, ...]
    axes: tuple[str, ...]
    group: int
    count: int
    source: str

    @property
    def nbytes(self) -> int:
        """Of all runs in a step."""
        return self.count * sum(array.nbytes for array in self.arrays)

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends in a step by the ring algorithm."""
        if self.kind == "collective-permute":
            return self.nbytes
        share = (self.group - 1) / self.group
        return self.nbytes * share * (2 if self.kind == "all-reduce" else 1)


class Instruction(NamedTuple):
    """A line of a computation: its result's text, its operation and the whole line."""

    name: str
    result: str
    opcode: str
    line: str


class Program:
    """A parsed program.

    Args:
      text: the HLO of one device's program.
      mesh: the mesh that it was compiled for, whose order of devices numbers its partitions.
    """

    def __init__(self, text: str, mesh: Mesh):
        self._mesh = mesh
        self._computations, self._entry = _parse(text)
        self._runs = self._count_runs()

    def collectives(self) -> list[Collective]:
        """All collectives that a step runs over more than one device."""
        found = []
        for computation, instruction in self._instructions():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            groups = self._groups(instruction.line)
            if groups.shape[1] == 1:
                continue
            arrays = _arrays(_result_of_start(instruction) if kind != instruction.opcode else instruction.result)
            if kind == "reduce-scatter":
                arrays = [_gathered(array, instruction.line, groups.shape[1]) for array in arrays]
            if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"  # How the TPU compiler spells it.
            source = re.search(r'op_name="([^"]*)"', instruction.line)
            found.append(
                Collective(
                    kind,
                    tuple(arrays),
                    self._axes(groups),
                    groups.shape[1],
                    self._runs[computation],
                    source[1] if source else "",
                )
            )
        return found

    def largest_arrays(self, number: int) -> list[tuple[Array, str]]:
        """The largest arrays that instructions outside fusions write, with the operation that they come from."""
        fused = {
            called
            for instructions in self._computations.values()
            for instruction in instructions
            if instruction.opcode == "fusion"
            for _, called in _calls(instruction.line)
        }
        found = {}
        for computation, instruction in self._instructions():
            if computation in fused or instruction.opcode in _VIEWS:
                continue
            source = re.search(r'op_name="([^"]*)"', instruction.line)
            for array in _arrays(instruction.result):
                found.setdefault(array, source[1] if source else instruction.opcode)
        return sorted(found.items(), key=lambda item: -item[0].nbytes)[:number]

    def _instructions(self) -> Iterator[tuple[str, Instruction]]:
        for computation, instructions in self._computations.items():
            if self._runs[computation]:
                yield from ((computation, instruction) for instruction in instructions)

    def _count_runs(self) -> collections.Counter:
        runs = collections.Counter()

        def visit(computation: str, times: int) -> None:
            runs[computation] += times
            for instruction in self._computations[computation]:
                turns = self._turns(instruction) if instruction.opcode == "while" else 1
                for role, called in _calls(instruction.line):
                    if role != "to_apply" or instruction.opcode == "call":
                        visit(called, times * (turns if role in ("body", "condition") else 1))

        visit(self._entry, 1)
        return runs

    def _turns(self, loop: Instruction) -> int:
        """How often a loop turns: as annotated, or the constant that its condition compares its counter with."""
        annotated = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.line)
        if annotated:
            return int(annotated[1])
        (condition,) = (called for role, called in _calls(loop.line) if role == "condition")
        limits = [
            int(limit)
            for instruction in self._reached(condition)
            if (limit := _constant(instruction)) is not None
        ]  # fmt: skip
        return max(limits, default=1)

    def _reached(self, computation: str) -> Iterator[Instruction]:
        for instruction in self._computations[computation]:
            yield instruction
            for _, called in _calls(instruction.line):
                yield from self._reached(called)

    def _groups(self, line: str) -> np.ndarray:
        """Partitions of each group, [groups, devices of a group]."""
        if pairs := re.search(r"source_target_pairs=\{(\{.*?\})\}", line):
            listed = [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", pairs[1])]
            sent = [pair for pair in listed if pair[0] != pair[1]]
            return np.array(sent or [[0]])
        if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\S+)? \{([^}]*)\}", line):
            sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
            ids, chosen = np.arange(math.prod(sizes.values())).reshape(*sizes.values()), []
            names: list[str] = list(sizes)
            for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", mesh[2]):
                if size:
                    # A part of an axis: the axis splits in three, of which the middle one counts.
                    axis, whole = names.index(name), sizes[name]
                    split = (int(before), int(size), whole // int(before) // int(size))
                    ids = ids.reshape(*ids.shape[:axis], *split, *ids.shape[axis + 1 :])
                    names[axis : axis + 1] = [f"{name}<", f"{name}:{before}", f"{name}>"]
                    name = f"{name}:{before}"
                chosen.append(name)
            kept = [i for i, name in enumerate(names) if name not in chosen]
            moved = ids.transpose(*kept, *(names.index(name) for name in chosen))
            return moved.reshape(math.prod(ids.shape[i] for i in kept), -1)
        if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
            sizes = [int(n) for n in iota[3].split(",")]
            ids = np.arange(math.prod(sizes)).reshape(sizes)
            if iota[4]:
                ids = ids.transpose([int(n) for n in iota[4].split(",")])
            return ids.reshape(int(iota[1]), int(iota[2]))
        if listed := re.search(r"replica_groups=\{(\{.*?\})\}", line):
            return np.array([[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", listed[1])])
        if "replica_groups={}" in line:
            return np.arange(self._mesh.size)[None]
        raise ValueError(f"groups of a collective in a form that is not known: {line.strip()[:300]}")

    def _axes(self, groups: np.ndarray) -> tuple[str, ...]:
        coordinates = np.array(np.unravel_index(groups, self._mesh.devices.shape))
        varies = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
        return tuple(itertools.compress(self._mesh.axis_names, varies))


def _parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    computations, entry, current = {}, "", []
    for line in text.splitlines():
        if header := _HEADER.fullmatch(line.rstrip()):
            current = computations.setdefault(header["name"], [])
            if line.startswith("ENTRY"):
                entry = header["name"]
        elif match := _INSTRUCTION.match(line):
            result, rest = _split_result(match["rest"])
            current.append(Instruction(match["name"], result, rest.partition("(")[0], line))
    return computations, entry


def _split_result(rest: str) -> tuple[str, str]:
    """Splits `TYPE opcode(...)`, where TYPE may be a tuple."""
    if not rest.startswith("("):
        result, _, after = rest.partition(" ")
        return result, after
    end = _closing(rest)
    return rest[: end + 1], rest[end + 2 :]


def _closing(text: str) -> int:
    """Where the parenthesis that `text` starts with closes."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i
    raise ValueError(f"unbalanced parentheses: {text[:100]}")


def _result_of_start(instruction: Instruction) -> str:
    """Results of a `-start` instruction, whose type is (operands, results, ...) or, of an all-reduce, the results."""
    result = instruction.result
    if not result.startswith("(") or (instruction.opcode == "all-reduce-start" and not result.startswith("((")):
        return result
    inner = result[1:-1]
    if inner.startswith("("):
        return inner[_closing(inner) + 1 :]
    operand = _ARRAY.match(inner)
    assert operand is not None
    rest = inner[operand.end() :]
    second = _ARRAY.search(rest)
    assert second is not None
    return second[0]


def _arrays(text: str) -> list[Array]:
    return [Array(d, tuple(int(n) for n in s.split(",") if n)) for d, s in _ARRAY.findall(text)]


def _gathered(part: Array, line: str, parts: int) -> Array:
    """The array that a reduce-scatter cuts into `part`s."""
    axis = re.search(r"dimensions=\{(\d+)\}", line)
    assert axis is not None
    shape = list(part.shape)
    shape[int(axis[1])] *= parts
    return Array(part.dtype, tuple(shape))


def _calls(line: str) -> list[tuple[str, str]]:
    """(role, computation) of everything that an instruction calls."""
    return [
        (role, name.strip().lstrip("%"))
        for role, names in _CALLED.findall(line)
        for name in names.strip("{}").split(",")
        if name.strip()
    ]


def _constant(instruction: Instruction) -> int | None:
    value = re.search(r"constant\((\d+)\)", instruction.line) if instruction.opcode == "constant" else None
    return int(value[1]) if value else None
