"""Checkpoints: asynchronous saves with Orbax, and a restore that never takes a damaged step.

A step is a folder named by its number with two items: `state`, the arrays in Orbax's format under flat names
such as `params/layers/query`, and `record`, a JSON document with the caller's metadata and with shape, type
and checksum of every array. The record makes up for what Orbax leaves open: it casts a wrong dtype silently,
and the storage format has no checksum over array data, so a flipped byte would go unnoticed. Checksums are
computed on the devices (one pass over the state, no file is read twice) and do not depend on how the arrays
are sharded.
"""

import errno
import json
import logging
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax import lax
from jax.experimental import multihost_utils

from orthros_jax.errors import UserError

# Orbax writes both when a step is complete; a folder without them was never committed.
_COMMIT_MARKS = ("_CHECKPOINT_METADATA", "commit_success.txt")

# What a checkpoint takes besides its arrays, at most.
_OVERHEAD_BYTES = 1 << 20


def _is_not_raised_anyway(record: logging.LogRecord) -> bool:
    return not (record.exc_info and f"{os.sep}orbax{os.sep}" in record.pathname)


# Orbax logs pages of tracebacks for a failed save, which it raises as well; the user gets one message.
logging.getLogger("absl").addFilter(_is_not_raised_anyway)


class Restored(NamedTuple):
    """What `Checkpoints.restore` found: step, state on the devices, and the metadata saved with it."""

    step: int
    state: Any
    metadata: dict


class _DamagedStep(Exception):
    """A step folder that cannot be read; the message is the reason."""


class Checkpoints:
    """The checkpoints of one run.

    A step counts as saved once it is committed. Retention keeps the newest `keep_last` saved steps and every
    step divisible by `keep_every`; the others are deleted after a newer step is committed, never before.

    Step folders newer than the restored one are damaged by construction: `restore` tried and skipped them. It
    leaves them alone, so that reading has no side effects, and the first save renames them to
    `<step>.damaged`. Then the same step can be saved again, retention does not count them, and nothing is
    lost if the damage was only a passing read error.

    Args:
      directory: folder of the step folders; created by the first save.
      keep_last: number of newest steps to keep.
      keep_every: keep every step divisible by this; None keeps none beyond the newest.
      report: called with one line for every step that is skipped or set aside; None prints to standard error.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep_last: int,
        keep_every: int | None,
        report: Callable[[str], None] | None = None,
    ):
        self.directory = Path(directory).absolute()
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=keep_last, keep_period=keep_every, cleanup_tmp_directories=True
        )
        self._report = report or _print_on_first_process
        self._manager: ocp.CheckpointManager | None = None
        self._pending: int | None = None
        self._newest: int | None = None
        self._has_looked = False

    @property
    def newest_step(self) -> int | None:
        """The newest step known to be complete: restored, or saved and committed."""
        return self._newest

    def save(self, step: int, state: Any, metadata: dict, *, wait: bool = False) -> bool:
        """Starts to save `state` and returns as soon as it is copied to the host, so that it may be donated.

        An earlier save that is still being written is waited for, and its failure is raised here. In a folder
        that holds steps, `restore` comes first.

        Args:
          step: number of completed steps; must exceed every step saved or restored so far, except that saving
            the newest step again does nothing.
          state: a pytree of jax.Arrays (typed random keys included) on one mesh.
          metadata: what JSON can hold; tuples come back as lists.
          wait: return only when the step is committed.

        Returns:
          Whether a save was made; False if this step is saved already.

        Raises:
          UserError: the disk is full or cannot be written; the last good step is intact.
        """
        self.wait()
        if step == self._newest:
            return False
        if self._newest is not None and step < self._newest:
            raise ValueError(f"step {step} is older than the newest checkpoint {self._newest}")
        arrays = {name: _plain(leaf) for name, leaf in _named_leaves(state).items()}
        record = _sealed(metadata, _named_leaves(state), _checksums(arrays))
        arguments = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), record=ocp.args.JsonSave(record))
        self._pending = step
        try:
            self._require_space(arrays)
            if self._manager is None:
                self._set_damaged_steps_aside()
                self._manager = ocp.CheckpointManager(self.directory, options=self._options, item_handlers=_handlers())
            # Without `force` Orbax skips a step that is not above what it takes for the latest, and says
            # nothing.
            saved = self._manager.save(step, args=arguments, force=True)
        except Exception as error:
            raise self._failure(error) from error
        if not saved:
            raise RuntimeError(f"Orbax skipped the save of step {step} in {self.directory}")
        if wait:
            self.wait()
        return True

    def wait(self) -> None:
        """Waits until the save in progress, if any, is committed.

        Raises:
          UserError: as in `save`.
        """
        if self._manager is None or self._pending is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(error) from error
        if not _is_committed(self.directory / str(self._pending)):
            raise RuntimeError(f"Orbax reported success but did not commit step {self._pending} in {self.directory}")
        self._newest, self._pending = self._pending, None

    def close(self) -> None:
        """Waits as `wait` does and releases Orbax's threads."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()
                self._manager = None

    def restore(self, abstract_state: Any, *, partial: bool = False, step: int | None = None) -> Restored | None:
        """Restores the newest step that is complete and whose every array matches its checksum.

        Args:
          abstract_state: the state as jax.ShapeDtypeStructs with the shardings to restore to; mesh and number
            of devices may differ from those at the save. A struct without sharding goes to the default
            device.
          partial: allow a target that lacks leaves of the checkpoint, for example the parameters alone.
          step: restore this one and no other.

        Returns:
          None if there is no readable step. Each step skipped is reported with the reason.

        Raises:
          UserError: the newest readable step holds other leaves, shapes or types; the message names the
          first. The step asked for is not there or damaged.
        """
        self._has_looked = True
        target = _named_leaves(abstract_state)
        steps = _steps(self.directory)
        if step is not None and step not in steps:
            there = f"the steps are {', '.join(map(str, steps))}" if steps else "there are none"
            raise UserError(f"{self.directory}: no checkpoint of step {step}; {there}")
        for number in reversed(steps if step is None else [step]):
            folder = self.directory / str(number)
            try:
                record = _read_record(folder)
                _require_fit(folder, record["leaves"], target, partial)
                arrays = _read_arrays(folder, record["leaves"], target)
            except _DamagedStep as damage:
                if step is not None:
                    raise UserError(f"checkpoint {folder} cannot be read: {damage}; take another step") from damage
                self._report(f"skipped checkpoint {folder}: {damage}")
                continue
            self._newest = number
            leaves = [_like(arrays[name], leaf) for name, leaf in target.items()]
            state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
            return Restored(number, state, record["metadata"])
        return None

    def _require_space(self, arrays: dict[str, jax.Array]) -> None:
        """Finds a full disk before Orbax does, whose pending writes then print hundreds of lines each."""
        existing = next(path for path in (self.directory, *self.directory.parents) if path.exists())
        usage = shutil.disk_usage(existing)
        needed = sum(array.nbytes for array in arrays.values()) + _OVERHEAD_BYTES
        # A total of 0 is a file system that does not tell.
        if usage.total and usage.free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def damaged_steps(self) -> list[str]:
        """Folders of steps that were complete once and are newer than the newest readable one, set aside or not."""
        newest = -1 if self._newest is None else self._newest
        names = [str(n) for n in _steps(self.directory) if n > newest and _is_committed(self.directory / str(n))]
        return names + sorted(path.name for path in self.directory.glob("*.damaged"))

    def _set_damaged_steps_aside(self) -> None:
        damaged = [step for step in _steps(self.directory) if self._newest is None or step > self._newest]
        if damaged and not self._has_looked:
            raise ValueError(f"{self.directory} holds steps {damaged}: call restore before the first save")
        if damaged and jax.process_index() == 0:
            for step in damaged:
                folder = self.directory / str(step)
                aside = folder.with_name(f"{step}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
                self._report(f"renamed the damaged checkpoint {folder} to {aside.name}; delete it to free the space")
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("damaged checkpoints are set aside")

    def _failure(self, error: Exception) -> Exception:
        """Removes what the failed save left and turns a fault of the disk into a UserError."""
        step, self._pending = self._pending, None
        if jax.process_index() == 0:
            for leftover in self.directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(leftover, ignore_errors=True)
            if not _is_committed(self.directory / str(step)):
                shutil.rmtree(self.directory / str(step), ignore_errors=True)
        self._manager = None
        reason = _disk_fault(error)
        if reason is None:
            return error
        kept = "no earlier checkpoint exists" if self._newest is None else f"checkpoint {self._newest} is intact"
        return UserError(
            f"cannot save step {step} in {self.directory}: {reason}; {kept}. "
            "Free space or set run_dir to another disk, then start the same command again to resume."
        )


def _handlers() -> dict[str, ocp.CheckpointHandler]:
    """How the items of a step are written. Compression makes float32 weights hardly smaller, and reading slower."""
    return {"state": ocp.PyTreeCheckpointHandler(use_compression=False), "record": ocp.JsonCheckpointHandler()}


def read_metadata(directory: str | os.PathLike) -> tuple[int, dict] | None:
    """Step and metadata of the newest step with an intact record, without touching arrays or devices."""
    for step in reversed(_steps(Path(directory))):
        try:
            return step, _read_record(Path(directory).absolute() / str(step))["metadata"]
        except _DamagedStep:
            continue
    return None


def _print_on_first_process(line: str) -> None:
    if jax.process_index() == 0:
        print(line, file=sys.stderr, flush=True)


def _steps(directory: Path) -> list[int]:
    """Numbers of all step folders, damaged ones included, in ascending order."""
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdecimal() and p.is_dir())


def _is_committed(folder: Path) -> bool:
    return all((folder / mark).is_file() for mark in _COMMIT_MARKS)


def _named_leaves(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two leaves of the state have the same name")
    return named


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: jax.Array) -> jax.Array:
    """Orbax stores plain arrays only: a typed random key becomes its words."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _like(array: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    if not _is_key(leaf):
        return array
    impl = []  # key_impl wants an array or a tracer, not a struct
    jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(array, impl=impl[0])


@jax.jit
def _checksums(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A uint32 for each array: the sum, modulo 2^32, of its words times odd weights that depend on their
    position.

    Any change of a single element changes it, for the weights are odd. Sums of integers do not depend on
    their order, hence not on mesh or sharding either.
    """
    return {name: _checksum(array) for name, array in arrays.items()}


def _checksum(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    words = lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * min(array.dtype.itemsize, 4)}")).astype(jnp.uint32)
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        index = index * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    golden_ratio = jnp.uint32(0x9E3779B1)
    return jnp.sum(words * (index * golden_ratio | jnp.uint32(1)), dtype=jnp.uint32)


def _shape_and_type(leaf: Any) -> dict:
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _sealed(metadata: dict, leaves: dict[str, Any], checksums: dict[str, jax.Array]) -> dict:
    sums = {name: int(value) for name, value in jax.device_get(checksums).items()}
    described = {name: {**_shape_and_type(leaf), "checksum": sums[name]} for name, leaf in leaves.items()}
    record = {"metadata": metadata, "leaves": described}
    return {**record, "crc32": _crc32(record)}


def _crc32(record: dict) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _first_line(error: Exception) -> str:
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}"


def _read_record(folder: Path) -> dict:
    if not _is_committed(folder):
        raise _DamagedStep("it was never committed" if any(folder.iterdir()) else "it is empty")
    try:
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
            record = checkpointer.restore(folder / "record")
        crc32 = record.pop("crc32")
    except Exception as error:
        raise _DamagedStep(f"its record cannot be read ({_first_line(error)})") from error
    if _crc32(record) != crc32:
        raise _DamagedStep("its record does not match its checksum")
    return record


def _require_fit(folder: Path, saved: dict[str, dict], target: dict[str, Any], partial: bool) -> None:
    def described(leaf: dict | None) -> str:
        return "absent" if leaf is None else f"{leaf['dtype']}{leaf['shape']}"

    wanted = {name: _shape_and_type(leaf) for name, leaf in target.items()}
    held = {name: {k: leaf[k] for k in ("shape", "dtype")} for name, leaf in saved.items()}
    names = wanted if partial else sorted(wanted | held)
    misfits = [name for name in names if wanted.get(name) != held.get(name)]
    if misfits:
        first = misfits[0]
        others = f" (and {len(misfits) - 1} more)" if len(misfits) > 1 else ""
        raise UserError(
            f"checkpoint {folder} does not fit these settings: {first} is {described(held.get(first))} in "
            f"the checkpoint and {described(wanted.get(first))} in this run{others}. "
            "Use the settings that the run was started with, or another run_dir."
        )


def _read_arrays(folder: Path, saved: dict, target: dict[str, Any]) -> dict[str, jax.Array]:
    arrays, reason = {}, None
    try:
        arrays = {name: _read_array(folder / "state", name, leaf) for name, leaf in target.items()}
    except MemoryError:
        raise  # no damage: an older step would not fit either
    except Exception as error:
        reason = f"its arrays cannot be read ({_first_line(error)})"
    # Every process must take the same step, and the checksums need all of them.
    if jax.process_count() > 1 and multihost_utils.process_allgather(np.array(reason is not None)).any():
        reason = reason or "another process cannot read its arrays"
    if reason:
        raise _DamagedStep(reason)
    sums = jax.device_get(_checksums(arrays))
    wrong = [name for name in arrays if int(sums[name]) != saved[name]["checksum"]]
    if wrong:
        raise _DamagedStep(f"the data of {wrong[0]} does not match its checksum")
    return arrays


def _read_array(folder: Path, name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Reads this process's shards of one array from Orbax's format, which is zarr inside OCDBT.

    Orbax's own restore reads all shards at once and abandons the others when one fails; on a damaged file
    they print pages of tracebacks from background threads. Here every read is waited for.
    """
    plain = jax.eval_shape(_plain, leaf) if _is_key(leaf) else leaf
    base = {"driver": "file", "path": f"{folder}/"}
    store = ts.open(
        {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"},
            "fill_missing_data_reads": False,
        },
        read=True,
        open=True,
    ).result()
    if store.shape != plain.shape or store.dtype.numpy_dtype != plain.dtype:
        raise ValueError(f"{name} is {store.dtype.name}{list(store.shape)} on disk, which its record denies")
    shards: dict[str, np.ndarray] = {}

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        if str(index) not in shards:
            shards[str(index)] = store[index].read().result()
        return shards[str(index)]

    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.make_array_from_callback(plain.shape, sharding, read)


def _disk_fault(error: BaseException) -> str | None:
    """The reason if a write failed for want of space or access; Orbax reports it in several guises."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    for cause in chain:
        if isinstance(cause, OSError) and cause.errno is not None and cause.errno != errno.ENOSPC:
            return os.strerror(cause.errno)
        if isinstance(cause, OSError) or "No space left" in str(cause):
            return os.strerror(errno.ENOSPC)
    return None
