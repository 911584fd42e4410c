"""The corpus "python-stdlib": source files of the running Python's standard library, which every machine has.

Left out are tests, installed packages, generated tables and near-duplicates. Whole folders are held out, so
that no held-out module has a sibling in training.
"""

import os
import sysconfig
import zlib
from collections import Counter, defaultdict
from pathlib import Path

from orthros_jax.data.readers import InputFile
from orthros_jax.errors import UserError

NAME = "python-stdlib"
HELDOUT_FOLDERS = frozenset({"http", "json", "wsgiref"})
EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
)
EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")
GENERATED_FILES = frozenset({"html/entities.py", "re/_casefix.py", "stringprep.py", "_opcode_metadata.py"})
MIN_BYTES = 5_000_000
# Lines shorter than this ("return self", "else:") are shared by unrelated files.
SHINGLE_CHARACTERS = 20
DUPLICATE_SHARE = 0.5


def stdlib_files(root: Path | None = None, min_bytes: int = MIN_BYTES) -> list[InputFile]:
    """Lists the corpus in a fixed order: held-out folders first, then the rest, each sorted by path.

    Args:
      root: folder to search; the running Python's standard library if None.
      min_bytes: smallest corpus that is worth training on.

    Raises:
      UserError: less than `min_bytes` of source, as where a distribution ships a minimal Python.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    names = sorted(_source_names(root), key=lambda name: (not _held_out(name), name))
    files, owners = [], defaultdict(list)
    for name in names:
        content = (root / name).read_bytes()
        if not content.strip() or not _is_utf8(content) or _is_duplicate(content, owners):
            continue
        for line in _shingles(content):
            owners[line].append(name)
        stat = (root / name).stat()
        split = "heldout" if _held_out(name) else "train"
        files.append(InputFile(str(root / name), stat.st_size, str(stat.st_mtime), split))
    total = sum(file.size for file in files)
    if total < min_bytes or not any(file.split == "heldout" for file in files):
        raise UserError(
            f"{NAME}: only {total / 1e6:.1f} MB of Python source under {root}, at least "
            f"{min_bytes / 1e6:.1f} MB are needed; use a full Python installation (on Debian: apt install "
            "python3-full), or name your own text files as the source"
        )
    return files


def _source_names(root: Path) -> list[str]:
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name not in EXCLUDED_FOLDERS and not name.startswith(EXCLUDED_PREFIXES)
        ]
        relative = Path(folder).relative_to(root)
        names += [
            (relative / name).as_posix()
            for name in files
            if name.endswith(".py") and not name.startswith(EXCLUDED_PREFIXES)
        ]
    return [name for name in names if name not in GENERATED_FILES]


def _held_out(name: str) -> bool:
    return name.split("/")[0] in HELDOUT_FOLDERS


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _shingles(content: bytes) -> set[int]:
    lines = (line.strip() for line in content.splitlines())
    return {zlib.crc32(line) for line in lines if len(line) >= SHINGLE_CHARACTERS}


def _is_duplicate(content: bytes, owners: dict[int, list[str]]) -> bool:
    """Whether one earlier file already holds most of this file's longer lines."""
    lines = _shingles(content)
    shared = Counter(name for line in lines for name in owners.get(line, ()))
    return bool(shared) and max(shared.values()) > DUPLICATE_SHARE * len(lines)
