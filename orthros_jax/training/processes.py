"""Several processes that train one model: how they find each other, and what is said when one of them is lost.

What starts the processes says who they are, in environment variables; there are no flags for it:

* `JAX_COORDINATOR_ADDRESS` (host:port of process 0), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, set by hand;
* SLURM, where `srun` has started more than one task;
* Cloud TPU, by itself or under Kubernetes.

JAX's runtime ends a process from within, without a word of Python, when another process of the run is gone. So each
process has a parent, which outlives it and says what happened.
"""

import glob
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from orthros_jax.errors import UserError

LOST = 3
"""Exit code of a process that ends because another one is gone."""

_EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# File descriptor that closes with the parent; its presence marks the child.
_LIFELINE = "ORTHROS_PARENT_FD"
# Seconds of silence after which a process counts as lost, and that a process waits for the others at its end.
_HEARTBEAT_SECONDS = 20
_SHUTDOWN_SECONDS = 120


def several_processes() -> dict[str, Any] | None:
    """Arguments for `jax.distributed.initialize` if this process is one of several, else None.

    Raises:
      UserError: the variables contradict each other.
    """
    given = [name for name in _EXPLICIT if name in os.environ]
    if given:
        missing = [name for name in _EXPLICIT if name not in os.environ]
        if missing:
            raise UserError(f"{', '.join(given)} without {', '.join(missing)}; set all three, or none of them")
        address = os.environ[_EXPLICIT[0]]
        count, process = (_whole_number(name) for name in _EXPLICIT[1:])
        if not address.rpartition(":")[2].isdecimal():
            raise UserError(f"JAX_COORDINATOR_ADDRESS: {address!r} has no port; write host:port of process 0")
        if not process < count:
            raise UserError(f"JAX_PROCESS_ID {process} is not below JAX_NUM_PROCESSES {count}; count from 0")
        who = {"coordinator_address": address, "num_processes": count, "process_id": process}
        # Under SLURM, JAX would otherwise still take one device a process.
        return {**who, "cluster_detection_method": "deactivate"}
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _all_gpus_of_slurm()
    return {} if _on_cloud_tpu() else None


def supervised(main: Callable[[], int], prog: str) -> int:
    """Runs `main` in this process, or in a child under its watch if this process is one of several.

    Returns:
      The exit code of `main`; LOST where another process of the run is gone.

    Raises:
      UserError: as `several_processes`.
    """
    arguments = several_processes()
    if arguments is None:
        return main()
    if _LIFELINE not in os.environ:
        return _watch_child(prog)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os._exit(_exit_code(main, arguments))


def _exit_code(main: Callable[[], int], arguments: dict[str, Any]) -> int:
    """Runs `main` among the other processes. Who fails does not wait for them at its end, as JAX would."""
    import jax

    try:
        jax.distributed.initialize(
            **arguments, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS, shutdown_timeout_seconds=_SHUTDOWN_SECONDS
        )
        code = main()
        if code == 0:
            jax.distributed.shutdown()
        return code
    except jax.errors.JaxRuntimeError:
        traceback.print_exc()
        return LOST
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _watch_child(prog: str) -> int:
    """Starts this command again as a child and explains its end."""
    lifeline, held = os.pipe()
    environment = {**os.environ, _LIFELINE: str(lifeline)}
    # A session of its own: a signal of the terminal reaches the child once, through this process.
    child = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]], env=environment, pass_fds=[lifeline], start_new_session=True
    )
    os.close(lifeline)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: child.send_signal(number))
    code = child.wait()
    os.close(held)
    if code == LOST or code < 0:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else "lost its connections"
        print(
            f"{prog}: error: this process {how}, most likely because another process of the run is gone; look there "
            "for the cause. The same command, with as many processes or another number, goes on from the newest "
            "checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        return LOST
    return code


def _end_with_parent() -> None:
    os.read(int(os.environ[_LIFELINE]), 1)  # returns when the parent, the only writer, is gone
    os._exit(LOST)


def _whole_number(name: str) -> int:
    value = os.environ[name]
    if not value.isdecimal():
        raise UserError(f"{name}: must be a whole number, got {value!r}")
    return int(value)


def _all_gpus_of_slurm() -> dict[str, Any]:
    """JAX takes the task's number on its host as its one GPU; a task that is alone on its host has all of them."""
    tasks = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
    is_alone = tasks is not None and int(tasks[0]) == 1
    return {"local_device_ids": list(range(gpus))} if is_alone and gpus else {}


def _on_cloud_tpu() -> bool:
    has_chips = bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))
    return has_chips and importlib.util.find_spec("libtpu") is not None
