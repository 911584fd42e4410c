"""`python -m orthros_jax prepare`: text becomes a tokenised data set, in parallel and resumable by part."""

import argparse
import dataclasses
import multiprocessing
import os
import sys
import threading
from collections import Counter
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tqdm import tqdm

from orthros_jax.config import DataConfig
from orthros_jax.data import stdlib
from orthros_jax.data.parts import (
    Settings,
    delete_records,
    group_files,
    part_done,
    read_part,
    read_texts,
    token_dtype,
    write_part,
)
from orthros_jax.data.readers import InputFile, resolve_inputs
from orthros_jax.data.storage import (
    FORMAT,
    INDEX_FILE,
    MANIFEST_FILE,
    PARTIAL_MARK,
    SPLITS,
    VERSION,
    atomic_writer,
    folder_lock,
    read_json,
    write_json,
)
from orthros_jax.data.tokenizer import (
    TOKENIZER_FILE,
    TRAINED_BOS_ID,
    TRAINED_EOS_ID,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    read_tokenizer,
    train_bpe,
    training_size,
)
from orthros_jax.errors import UserError

# Text that a new BPE is trained on, taken evenly from the start of every input file.
TRAINING_CHARACTERS = 256 << 20


def prepare(
    inputs: list[str],
    output: Path | str,
    *,
    tokenizer: str = "byte",
    text_field: str = "text",
    holdout: float = 0.005,
    bos: bool = True,
    eos: bool = True,
    bos_token: str | None = None,
    eos_token: str | None = None,
    workers: int | None = None,
    skip_corrupt: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Tokenises documents into the folder `output` and returns its index.

    The bytes depend on the inputs and the settings alone, not on `workers`, nor on interruptions: the same call after
    one continues with the parts that are missing, and on a finished data set it changes nothing.

    Args:
      inputs: files, folders, globs, fsspec URLs, or `python-stdlib`.
      output: folder to write; new, empty, or left by an earlier call with the same arguments.
      tokenizer: `byte`, a tokenizer.json, or `train:SIZE` to train a byte-level BPE on the inputs.
      text_field: parquet column or JSON key of the text.
      holdout: share of the documents that is held out, drawn from the text of each.
      bos: start each document with the tokenizer's BOS.
      eos: end each document with the tokenizer's EOS.
      bos_token: spelling of BOS where the tokenizer does not tell.
      eos_token: spelling of EOS where the tokenizer does not tell.
      workers: processes; one for each available core if None.
      skip_corrupt: go on with the next file where one is damaged, and count it.
      progress: show a progress bar and a summary on standard error.

    Raises:
      UserError: missing or damaged inputs, no text in them, a full disk, or an output made with other arguments.
    """
    output = Path(output)
    if not 0 <= holdout < 1:
        raise UserError(f"holdout {holdout} must be at least 0 and below 1")
    if workers is not None and workers < 1:
        raise UserError(f"workers {workers} must be at least 1")
    files = _input_files(inputs)
    size = training_size(tokenizer)
    given = None if size else read_tokenizer(tokenizer, bos_token, eos_token)
    settings = Settings(
        tokenizer=given.name if given else tokenizer,
        fingerprint=given.fingerprint if given else None,
        bos_id=_framing_id("bos", bos, tokenizer, given.bos_id if given else TRAINED_BOS_ID),
        eos_id=_framing_id("eos", eos, tokenizer, given.eos_id if given else TRAINED_EOS_ID),
        text_field=text_field,
        holdout=holdout,
        skip_corrupt=skip_corrupt,
    )
    _make_folder(output)
    with folder_lock(output):
        _check_manifest(output, settings, files)
        if not (output / INDEX_FILE).exists():
            for partial in output.glob(f"*{PARTIAL_MARK}*"):
                partial.unlink()
            used = given or _trained_tokenizer(output, settings, files, size or 0)
            if isinstance(used, FileTokenizer):
                _write_bytes(output / TOKENIZER_FILE, used.content)
            parts = group_files(files)
            _write_parts(parts, settings, used, output, workers or _available_cores(), progress)
            write_json(output / INDEX_FILE, _build_index(output, len(parts), settings, used))
        delete_records(output)
    index = read_json(output / INDEX_FILE)
    if progress:
        print(summary(output, index), file=sys.stderr)
    return index


def prepare_if_missing(data: DataConfig) -> None:
    """Prepares `data.source` where the only path holds no finished data set yet; does nothing without a source."""
    if data.source is not None and not (Path(data.paths[0]) / INDEX_FILE).exists():
        prepare([data.source], data.paths[0], tokenizer=data.tokenizer)


def summary(output: Path, index: dict[str, Any]) -> str:
    """A line for each split, and one for what was skipped."""
    lines = [
        f"{output}: tokenizer {index['tokenizer']['name']}, vocabulary {index['tokenizer']['vocab_size']:,}"
    ]
    for split in SPLITS:
        total = index["splits"][split]
        lines.append(
            f"  {split:8s} {total['tokens']:>15,} tokens {total['documents']:>12,} documents "
            f"{total['text_bytes']:>15,} bytes of text"
        )
    if index["skipped"]:
        lines.append(
            "  skipped: " + ", ".join(f"{count:,} {reason}" for reason, count in index["skipped"].items())
        )
    if not index["splits"]["heldout"]["documents"]:
        lines.append("  the held-out split is empty, so there is nothing to evaluate on; raise --holdout")
    return "\n".join(lines)


def _input_files(inputs: list[str]) -> list[InputFile]:
    if not inputs:
        raise UserError("no input: name files, folders, globs, URLs or python-stdlib")
    if stdlib.NAME not in inputs:
        return resolve_inputs(inputs)
    if len(inputs) > 1:
        raise UserError(
            f"{stdlib.NAME} is a corpus by itself; prepare the other inputs into another folder and mix them"
        )
    return stdlib.stdlib_files()


def _framing_id(key: str, wanted: bool, tokenizer: str, token_id: int | None) -> int | None:
    if wanted and token_id is None:
        raise UserError(
            f"{tokenizer}: this tokenizer names no {key.upper()} token; give its spelling with --{key}_token, "
            f"or do without with --no_{key}"
        )
    return token_id if wanted else None


def _make_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"{output}: is a file; choose another output folder") from None
    except OSError as error:
        raise UserError(f"{output}: cannot be created: {error.strerror}") from None


def _check_manifest(output: Path, settings: Settings, files: list[InputFile]) -> None:
    """Writes down what is asked for, or compares it with what an earlier call wrote down."""
    path = output / MANIFEST_FILE
    asked = {
        "format": FORMAT,
        "version": VERSION,
        "settings": dataclasses.asdict(settings),
        "inputs": [dataclasses.asdict(file) for file in files],
    }
    if path.exists():
        differences = _differences(read_json(path), asked)
        if differences:
            raise UserError(
                f"{output}: holds a data set prepared differently ({'; '.join(differences)}); "
                "choose another output, repeat the earlier arguments, or delete the folder to prepare it anew"
            )
        return
    if any(PARTIAL_MARK not in entry.name for entry in output.iterdir()):
        raise UserError(f"{output}: is neither empty nor a prepared data set; choose another output folder")
    write_json(path, asked)


def _differences(earlier: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    if (earlier["format"], earlier["version"]) != (asked["format"], asked["version"]):
        return [f"format {earlier['format']} {earlier['version']}, now {asked['format']} {asked['version']}"]
    found = [
        f"{key} was {earlier['settings'].get(key)}, now {value}"
        for key, value in asked["settings"].items()
        if earlier["settings"].get(key) != value
    ]
    before = {file["path"]: file for file in earlier["inputs"]}
    now = {file["path"]: file for file in asked["inputs"]}
    changes = [
        ("missing input", sorted(before.keys() - now.keys())),
        ("new input", sorted(now.keys() - before.keys())),
    ]
    changes.append(
        ("changed input", sorted(path for path in before.keys() & now.keys() if before[path] != now[path]))
    )
    for what, paths in changes:
        if paths:
            found.append(f"{what} {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else ""))
    return found


def _write_bytes(path: Path, content: bytes) -> None:
    with atomic_writer(path) as stream:
        stream.write(content)


def _trained_tokenizer(output: Path, settings: Settings, files: list[InputFile], size: int) -> Tokenizer:
    path = output / TOKENIZER_FILE
    if path.exists():
        content = path.read_bytes()
    else:
        content = train_bpe(_training_texts(files, settings), size)
    return FileTokenizer(content, settings.tokenizer, TRAINED_BOS_ID, TRAINED_EOS_ID)


def _training_texts(files: list[InputFile], settings: Settings):
    """Iterates training documents from every file, as many characters from each."""
    share = max(1, TRAINING_CHARACTERS // len(files))
    for file in files:
        left = share
        for split, text, _ in read_texts([file], settings, Counter()):
            if split == "train":
                yield text[:left]
                left -= len(text)
            if left <= 0:
                break


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write_parts(
    parts: list[list[InputFile]],
    settings: Settings,
    tokenizer: Tokenizer,
    output: Path,
    workers: int,
    progress: bool,
) -> None:
    missing = [number for number in range(len(parts)) if not part_done(output, number)]
    workers = min(workers, len(missing))
    bar = tqdm(
        total=len(parts), initial=len(parts) - len(missing), desc="prepare", unit="part", disable=not progress
    )
    with bar:
        if workers <= 1:
            done = 0

            def show(tokens: int) -> None:
                nonlocal done
                done += tokens
                bar.set_postfix_str(f"{done / 1e6:.1f}M tokens")

            for number in missing:
                write_part(number, parts[number], settings, tokenizer, output, show)
                bar.update()
            return
        _write_in_processes(missing, parts, settings, tokenizer, output, workers, bar)


def _write_in_processes(
    missing: list[int],
    parts: list[list[InputFile]],
    settings: Settings,
    tokenizer: Tokenizer,
    output: Path,
    workers: int,
    bar: tqdm,
) -> None:
    # Spawned, not forked: the parent may already run the threads of JAX and of tokenizers.
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    threads = max(1, _available_cores() // workers)
    pool = ProcessPoolExecutor(
        workers,
        context,
        _start_worker,
        (settings, _worker_spec(tokenizer, settings), output, threads, counter),
    )
    try:
        pending = {pool.submit(_run_part, number, parts[number]) for number in missing}
        while pending:
            done, pending = wait(pending, timeout=0.5, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
                bar.update()
            bar.set_postfix_str(f"{counter.value / 1e6:.1f}M tokens")
    except BrokenProcessPool:
        raise UserError(
            f"{output}: a worker process died, most likely out of memory; "
            "run the same command again with fewer --workers, it continues"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_worker: dict[str, Any] = {}


def _worker_spec(tokenizer: Tokenizer, settings: Settings) -> tuple | None:
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer.content, tokenizer.name, tokenizer.bos_id, tokenizer.eos_id
    return None


def _start_worker(
    settings: Settings, tokenizer: tuple | None, output: Path, threads: int, counter: Any
) -> None:
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _worker.update(
        settings=settings,
        tokenizer=FileTokenizer(*tokenizer) if tokenizer else ByteTokenizer(),
        output=output,
        counter=counter,
    )


def _die_with_parent() -> None:
    """A killed parent cannot stop its workers, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_part(number: int, files: list[InputFile]) -> None:
    def count(tokens: int) -> None:
        with _worker["counter"].get_lock():
            _worker["counter"].value += tokens

    write_part(number, files, _worker["settings"], _worker["tokenizer"], _worker["output"], count)


def _build_index(output: Path, parts: int, settings: Settings, tokenizer: Tokenizer) -> dict[str, Any]:
    records = [read_part(output, number) for number in range(parts)]
    skipped: Counter[str] = Counter()
    for record in records:
        skipped.update(record["skipped"])
    splits = {}
    for split in SPLITS:
        shards = [record["splits"][split] for record in records if record["splits"][split]["tokens"]]
        total = {key: sum(shard[key] for shard in shards) for key in ("tokens", "documents", "text_bytes")}
        splits[split] = {**total, "shards": shards}
    if not splits["train"]["documents"]:
        reasons = (
            ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items())) or "no rows at all"
        )
        heldout = splits["heldout"]["documents"]
        raise UserError(
            f"{output}: the inputs hold no training text (skipped: {reasons}; held out: {heldout} documents); "
            "check the files and --text_field" + (", or lower --holdout" if heldout else "")
        )
    return {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
        },
        "bos": settings.bos_id is not None,
        "eos": settings.eos_id is not None,
        "dtype": token_dtype(tokenizer.vocab_size),
        "skipped": dict(sorted(skipped.items())),
        "splits": splits,
    }


def main(argv: list[str] | None = None) -> None:
    """The command `prepare`; exits with code 2 and one message on a mistake in the arguments or the inputs."""
    parser = argparse.ArgumentParser(
        prog="python -m orthros_jax prepare",
        description="Tokenise text into a data set folder that training reads. Run it again to continue.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="files, folders, quoted globs, URLs, or python-stdlib")
    add("--output", required=True, help="folder of the data set")
    add("--tokenizer", default="byte", help="byte, a tokenizer.json, or train:SIZE (default: byte)")
    add("--text_field", default="text", help="parquet column or JSON key of the text (default: text)")
    add("--holdout", type=float, default=0.005, help="share of the documents to hold out (default: 0.005)")
    add("--no_bos", action="store_true", help="do not start documents with BOS")
    add("--no_eos", action="store_true", help="do not end documents with EOS")
    add("--bos_token", help="spelling of BOS where the tokenizer does not tell")
    add("--eos_token", help="spelling of EOS where the tokenizer does not tell")
    add("--workers", type=int, help="processes (default: one for each core)")
    add("--skip_corrupt", action="store_true", help="skip and count damaged files instead of stopping")
    arguments = parser.parse_args(argv)
    try:
        prepare(
            arguments.input,
            arguments.output,
            tokenizer=arguments.tokenizer,
            text_field=arguments.text_field,
            holdout=arguments.holdout,
            bos=not arguments.no_bos,
            eos=not arguments.no_eos,
            bos_token=arguments.bos_token,
            eos_token=arguments.eos_token,
            workers=arguments.workers,
            skip_corrupt=arguments.skip_corrupt,
        )
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
