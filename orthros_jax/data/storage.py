"""The files of a prepared data set: names, versions, and writing without leaving anything half-written.

index.json            what the data set holds; written last, so a folder that has it is complete
manifest.json         what was asked for: settings and input files
tokenizer.json        the tokenizer, unless it is `byte`
train-00000.tokens    token ids, little-endian uint16 or uint32, documents one after another
train-00000.offsets   where each document ends in that file, counted in tokens, little-endian int64
heldout-00000.*       the same for the held-out split
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from orthros_jax.errors import UserError

FORMAT = "orthros-tokens"
VERSION = 1
INDEX_FILE = "index.json"
MANIFEST_FILE = "manifest.json"
SPLITS = ("train", "heldout")
OFFSET_DTYPE = "<i8"
PARTIAL_MARK = ".partial-"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Opens a file beside `path` that takes its name when the block ends well and vanishes when it does not.

    Raises:
      UserError: the disk is full.
    """
    partial = path.with_name(f"{path.name}{PARTIAL_MARK}{os.getpid()}")
    try:
        with open(partial, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise UserError(
            f"{path.parent}: no space left on the disk; free some and run the same command again, it continues"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    with atomic_writer(path) as stream:
        stream.write(json.dumps(value, indent=1).encode() + b"\n")


def read_json(path: Path) -> Any:
    """Raises:
    UserError: the file holds something other than JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: damaged: {error}; delete the folder and prepare it again") from error


@contextmanager
def folder_lock(folder: Path, busy: str) -> Iterator[None]:
    """Holds the folder for this process; the lock ends with the process, however that dies.

    Args:
      busy: what to say where another process holds it.

    Raises:
      UserError: another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder}: {busy}") from None
    else:
        yield
    finally:
        os.close(handle)
