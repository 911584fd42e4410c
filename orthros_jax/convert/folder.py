"""Folders that appear whole or not at all."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from orthros_jax.data.storage import DISK_FULL
from orthros_jax.errors import UserError


def require_new(output: Path) -> None:
    """Raises:
    UserError: `output` is a file or a folder with something in it.
    """
    if output.is_dir():
        if any(output.iterdir()):
            raise UserError(f"{output}: the output folder is not empty; name a new one")
    elif output.exists():
        raise UserError(f"{output}: the output is a file; name a new folder")


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its name when the block ends well and vanishes when it does not.

    Raises:
      UserError: as `require_new`, or the disk is full or cannot be written.
    """
    require_new(output)
    partial = output.absolute().with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        with contextlib.suppress(FileNotFoundError):
            output.rmdir()
        partial.rename(output.absolute())
    except OSError as error:
        if error.errno not in (*DISK_FULL, errno.EACCES, errno.EROFS):
            raise
        raise UserError(f"{output}: cannot be written: {error.strerror}; free space or name another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
