"""Making the missing parts of a data set, in this process or in several."""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tqdm import tqdm

from orthros_jax.data.parts import Settings, part_done, write_part
from orthros_jax.data.readers import InputFile
from orthros_jax.data.tokenizer import Tokenizer
from orthros_jax.errors import UserError


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_parts(
    parts: list[list[InputFile]],
    settings: Settings,
    tokenizer: Tokenizer,
    output: Path,
    workers: int,
    progress: bool,
) -> None:
    """Writes every part that has no record yet, with at most `workers` processes.

    Raises:
      UserError: what reading or writing raises, or a worker process that died.
    """
    missing = [number for number in range(len(parts)) if not part_done(output, number)]
    done = len(parts) - len(missing)
    with tqdm(total=len(parts), initial=done, desc="prepare", unit="part", disable=not progress) as bar:
        if min(workers, len(missing)) > 1:
            _write_in_processes(missing, parts, settings, tokenizer, output, workers, bar)
            return
        tokens = 0

        def show(count: int) -> None:
            nonlocal tokens
            tokens += count
            bar.set_postfix_str(_in_millions(tokens))

        for number in missing:
            write_part(number, parts[number], settings, tokenizer, output, show)
            bar.update()


def _in_millions(tokens: int) -> str:
    return f"{tokens / 1e6:.1f}M tokens"


def _write_in_processes(
    missing: list[int],
    parts: list[list[InputFile]],
    settings: Settings,
    tokenizer: Tokenizer,
    output: Path,
    workers: int,
    bar: tqdm,
) -> None:
    workers = min(workers, len(missing))
    threads = max(1, available_cores() // workers)
    # Spawned, not forked: the parent may already run the threads of JAX and of tokenizers.
    context = multiprocessing.get_context("spawn")
    tokens, stop = context.Value("q", 0), context.Event()
    shared = {"settings": settings, "tokenizer": tokenizer, "output": output, "tokens": tokens, "stop": stop}
    pool = ProcessPoolExecutor(workers, context, _start_worker, (threads, shared))
    try:
        pending = {pool.submit(_run_part, number, parts[number]) for number in missing}
        while pending:
            done, pending = wait(pending, timeout=0.5, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
                bar.update()
            bar.set_postfix_str(_in_millions(tokens.value))
    except BrokenProcessPool:
        raise UserError(
            f"{output}: a worker process died, most likely out of memory; "
            "run the same command again with fewer --workers, it continues"
        ) from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


_shared: dict[str, Any] = {}


class _StoppedError(Exception):
    """The parent has given up, so this worker does as well."""


def _start_worker(threads: int, shared: dict[str, Any]) -> None:
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    # The terminal sends an interrupt to every process; the parent passes it on through `stop`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _shared.update(shared)


def _die_with_parent() -> None:
    """A killed parent cannot stop its workers, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_part(number: int, files: list[InputFile]) -> None:
    def count(tokens: int) -> None:
        with _shared["tokens"].get_lock():
            _shared["tokens"].value += tokens
        if _shared["stop"].is_set():
            raise _StoppedError

    write_part(number, files, _shared["settings"], _shared["tokenizer"], _shared["output"], count)
