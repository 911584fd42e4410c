"""The corpus that every machine has."""

import subprocess
import sys
from pathlib import Path

import pytest

from orthros_jax.data.stdlib import HELDOUT_FOLDERS, stdlib_files
from orthros_jax.errors import UserError

ROOT = Path(__file__).parents[2]


def source(seed, lines=20):
    return "".join(f"variable_{seed}_{i} = compute_{seed}_{i}({i})\n" for i in range(lines))


def write(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def names(root, split=None, min_bytes=0):
    files = stdlib_files(root, min_bytes)
    return [Path(file.path).relative_to(root).as_posix() for file in files if split in (None, file.split)]


def test_the_real_library():
    files = stdlib_files()
    heldout = sum(file.size for file in files if file.split == "heldout")
    train = sum(file.size for file in files if file.split == "train")
    assert 250_000 < heldout < 400_000
    assert train > 5_000_000
    parts = {part for file in files for part in Path(file.path).parts[-3:]}
    assert not parts & {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "encodings",
        "topics.py",
        "entities.py",
    }
    assert {Path(file.path).parts[-2] for file in files if file.split == "heldout"} == HELDOUT_FOLDERS


def test_order_is_the_same_in_another_process():
    program = "from orthros_jax.data.stdlib import stdlib_files; print([f.path for f in stdlib_files()])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{[file.path for file in stdlib_files()]}\n"}


def test_what_is_left_out(tmp_path):
    kept = ("json/decoder.py", "abc.py", "email/parser.py", "re/_parser.py")
    left_out = (
        "test/test_abc.py",
        "json/tests/x.py",
        "idlelib/idle_test/x.py",
        "site-packages/numpy/x.py",
        "encodings/cp037.py",
        "pydoc_data/topics.py",
        "config-3.12-x86_64-linux-gnu/x.py",
        "_sysconfigdata__linux_.py",
        "re/_casefix.py",
        "html/entities.py",
        "json/data.json",
    )
    write(tmp_path, {name: source(i) for i, name in enumerate((*kept, *left_out))})
    write(tmp_path, {"empty.py": " \n", "latin.py": b"# caf\xe9\n" + source(99).encode()})
    assert names(tmp_path) == ["json/decoder.py", "abc.py", "email/parser.py", "re/_parser.py"]
    assert names(tmp_path, "heldout") == ["json/decoder.py"]


def test_near_duplicates_are_left_out(tmp_path):
    half = source(1, 10)
    write(
        tmp_path,
        {
            "a.py": source(1),
            "b.py": half + source(2, 9),
            "c.py": half + source(3, 11),
            "d.py": source(4) + "\nif True:\n    pass\n",
            "e.py": source(5) + "\nif True:\n    pass\n",
        },
    )
    write(tmp_path, {"json/x.py": source(9)})
    assert names(tmp_path, "train") == ["a.py", "c.py", "d.py", "e.py"]


def test_a_training_file_that_repeats_a_held_out_one_goes(tmp_path):
    write(tmp_path, {"json/decoder.py": source(1), "_json_copy.py": source(1), "other.py": source(2)})
    assert names(tmp_path) == ["json/decoder.py", "other.py"]


def test_too_little_source(tmp_path):
    write(tmp_path, {"json/decoder.py": source(1), "other.py": source(2)})
    with pytest.raises(UserError) as error:
        stdlib_files(tmp_path)
    assert str(error.value) == (
        f"python-stdlib: only 0.0 MB of Python source under {tmp_path}, at least 5.0 MB are needed; use a "
        "full "
        "Python installation (on Debian: apt install python3-full), or name your own text files as the source"
    )
