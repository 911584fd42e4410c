"""Imports point one way, at the top of a file and inside functions alike."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What each part may import of this project, from the top (entry points) to the bottom. A part is a module or
# a package with all that is in it, and may import itself. The longest name that fits decides.
BOTTOM = {"orthros_jax.errors", "orthros_jax.config"}
MODEL = {*BOTTOM, "orthros_jax.streams", "orthros_jax.sharding", "orthros_jax.model", "orthros_jax.loss"}
ALLOWED = {
    "train": {*BOTTOM, "orthros_jax.config_reader", "orthros_jax.training"},
    "orthros_jax.compilation": {*MODEL, "orthros_jax.config_reader", "orthros_jax.training", "pallas_kernels"},
    "orthros_jax.__main__": {
        *BOTTOM,
        "orthros_jax.compilation",
        "orthros_jax.convert",
        "orthros_jax.data",
        "orthros_jax.inference",
        "orthros_jax.training",
    },
    "orthros_jax.training": {
        *MODEL,
        "orthros_jax.config_reader",
        "orthros_jax.data",
        "orthros_jax.inference",
    },
    # Checkpoints know nothing of training.
    "orthros_jax.training.checkpoint": {"orthros_jax.errors"},
    "orthros_jax.convert": {
        *MODEL,
        "orthros_jax.config_reader",
        "orthros_jax.data",
        "orthros_jax.training.checkpoint",
    },
    "orthros_jax.inference": {
        *MODEL,
        "orthros_jax.config_reader",
        "orthros_jax.convert",
        "orthros_jax.data",
        "orthros_jax.training.checkpoint",
        "pallas_kernels",
    },
    "orthros_jax.evaluation": {
        *MODEL,
        "orthros_jax.config_reader",
        "orthros_jax.inference",
        "orthros_jax.data",
    },
    "orthros_jax.data": BOTTOM,
    "orthros_jax.model": {*BOTTOM, "orthros_jax.streams", "orthros_jax.sharding", "pallas_kernels"},
    "orthros_jax.loss": {*BOTTOM, "orthros_jax.streams", "orthros_jax.sharding"},
    "orthros_jax.sharding": BOTTOM,
    "orthros_jax.streams": BOTTOM,
    "orthros_jax.config_reader": BOTTOM,
    "orthros_jax.config": {"orthros_jax.errors"},
    "orthros_jax.errors": set(),
    "orthros_jax": set(),
    "pallas_kernels": set(),
}
# Packages beyond jax and numpy that a backend needs. Device code imports its own at the top of the file.
DEVICE_CODE = {"pallas_kernels.paired_decode_attention.triton_kernels"}
EXTRAS = {
    "pallas_kernels.paired_decode_attention.triton": {"jax_triton"},
    "pallas_kernels.paired_decode_attention.triton_kernels": {"triton"},
}
PROJECT = ("orthros_jax", "pallas_kernels", "train", "benchmarks", "tests")


def belongs(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(source: str, module: str, is_package: bool = False) -> set[str]:
    """Absolute dotted names of all imports, wherever they stand; `from a import b` counts as a.b."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".") + (["__init__"] if is_package else [])
                base = ".".join([*parents[: -node.level], *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def forbidden_imports(source: str, module: str, is_package: bool = False) -> set[str]:
    # The package itself holds no more than a docstring and may import nothing.
    part = max((part for part in ALLOWED if belongs(module, part)), key=len)
    if part == "orthros_jax" and module != "orthros_jax":
        raise KeyError(f"{module} has no entry in the table of imports")
    allowed = {part, *ALLOWED[part]}
    return {
        name
        for name in imported_names(source, module, is_package)
        if name.partition(".")[0] in PROJECT and not any(belongs(name, other) for other in allowed)
    }


def sources(*folders: str) -> list[Path]:
    return [
        ROOT / "train.py",
        *(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))),
    ]


def test_imports_follow_the_table():
    wrong = {
        module_name(path): forbidden
        for path in sources("orthros_jax", "pallas_kernels")
        if (
            forbidden := forbidden_imports(
                path.read_text(encoding="utf-8"), module_name(path), path.name == "__init__.py"
            )
        )
    }
    assert wrong == {}


def test_kernels_need_jax_and_numpy_only():
    allowed = {"jax", "numpy", "pallas_kernels", *sys.stdlib_module_names}
    for path in sorted((ROOT / "pallas_kernels").rglob("*.py")):
        module = module_name(path)
        names = imported_names(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
        assert {name.partition(".")[0] for name in names} <= allowed | EXTRAS.get(module, set()), path


def test_extras_of_the_kernels_are_imported_where_used():
    """`import pallas_kernels` works without them: no module that needs one is imported at the top of another."""
    for path in sorted((ROOT / "pallas_kernels").rglob("*.py")):
        module = module_name(path)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
        names = imported_names(ast.unparse(tree), module, path.name == "__init__.py")
        assert not any(belongs(name, kernels) for name in names for kernels in DEVICE_CODE), path
        if module not in DEVICE_CODE:
            assert not {name.partition(".")[0] for name in names} & set().union(*EXTRAS.values()), path


def test_nothing_imports_what_stands_at_the_top():
    for path in sources("orthros_jax", "pallas_kernels", "benchmarks"):
        names = imported_names(path.read_text(encoding="utf-8"), module_name(path))
        assert not {name for name in names if name.partition(".")[0] in ("train", "tests")}, path


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("orthros_jax.model.layers", "import orthros_jax.training.step", {"orthros_jax.training.step"}),
        ("orthros_jax.model.layers", "def f():\n  from orthros_jax import data", {"orthros_jax.data"}),
        ("orthros_jax.data.reader", "from orthros_jax.training import x", {"orthros_jax.training.x"}),
        ("orthros_jax.data.reader", "from ..training import x", {"orthros_jax.training.x"}),
        ("orthros_jax.inference.api", "from orthros_jax.training import x", {"orthros_jax.training.x"}),
        ("orthros_jax.streams", "import pallas_kernels", {"pallas_kernels"}),
        ("pallas_kernels.decode.api", "from orthros_jax import errors", {"orthros_jax.errors"}),
        ("orthros_jax.model.layers", "from . import attention\nimport jax, orthros_jax.config", set()),
        ("orthros_jax.model.layers", "from orthros_jax.models import x", {"orthros_jax.models.x"}),
    ],
)
def test_the_check_finds_each_kind_of_import(module, source, expected):
    assert forbidden_imports(source, module) == expected


def test_a_module_outside_the_table_is_reported():
    with pytest.raises(KeyError, match=r"orthros_jax\.utils has no entry"):
        forbidden_imports("", "orthros_jax.utils")
