"""The folders that a run writes to: found unfit before any work is lost, and full ones explained."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from orthros_jax.config import ConfigError
from orthros_jax.data.storage import DISK_FULL
from orthros_jax.errors import UserError


def check_folder(key: str, folder: Path) -> None:
    """Whether `folder` is or can become a folder to write in; nothing is created yet.

    Args:
      key: the setting that names it.

    Raises:
      ConfigError: it is no such folder.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(key, f"{existing} is a file; name a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(key, f"{existing} cannot be written; name another folder")


def make_folder(key: str, folder: Path) -> None:
    """Makes `folder`, which `check_folder` has found fit.

    Raises:
      ConfigError: the system refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise ConfigError(key, f"{folder} cannot be created ({error.strerror}); name another folder") from error


@contextlib.contextmanager
def disk_full_explained(run_dir: str) -> Iterator[None]:
    """What is written besides checkpoints, which explain a full disk themselves, can find it full as well."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise UserError(
            f"{run_dir}: no space left on the disk; free some and run the same command again, it continues from the "
            "newest checkpoint"
        ) from error
