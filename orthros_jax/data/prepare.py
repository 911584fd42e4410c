"""`python -m orthros_jax prepare`: text becomes a tokenised data set, in parallel and resumable by part."""

import argparse
import dataclasses
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from orthros_jax.config import DataConfig
from orthros_jax.data import stdlib
from orthros_jax.data.parts import (
    SHARD_PATTERNS,
    Settings,
    any_record,
    delete_records,
    group_files,
    part_done,
    read_part,
    read_texts,
    token_dtype,
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
    FileTokenizer,
    Tokenizer,
    read_tokenizer,
    train_bpe,
    training_size,
)
from orthros_jax.data.workers import available_cores, write_parts
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

    The bytes depend on the inputs and the settings alone, not on `workers`, nor on interruptions: after one,
    the same call continues with the parts that are missing, and on a finished data set it changes nothing.

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
      UserError: missing or damaged inputs, no text in them, a full disk, an output made with other arguments.
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
    created = _make_folder(output)
    with folder_lock(output, "another process is preparing this data set; wait for it, or choose another output"):
        _check_manifest(output, settings, files)
        try:
            if not (output / INDEX_FILE).exists():
                _fill(output, settings, files, given, size or 0, workers or available_cores(), progress)
            delete_records(output)
        finally:
            # A first attempt that failed, say for a wrong text_field, must not stand in the way of the next.
            if not _started(output):
                _clear(output)
                if created:
                    output.rmdir()
    index = read_json(output / INDEX_FILE)
    if progress:
        print(summary(output, index), file=sys.stderr)
    return index


def _fill(
    output: Path,
    settings: Settings,
    files: list[InputFile],
    given: Tokenizer | None,
    size: int,
    workers: int,
    progress: bool,
) -> None:
    for partial in output.glob(f"*{PARTIAL_MARK}*"):
        partial.unlink()
    tokenizer = given or _trained_tokenizer(output, settings, files, size)
    if isinstance(tokenizer, FileTokenizer):
        with atomic_writer(output / TOKENIZER_FILE) as stream:
            stream.write(tokenizer.content)
    parts = group_files(files)
    write_parts(parts, settings, tokenizer, output, workers, progress)
    write_json(output / INDEX_FILE, _build_index(output, len(parts), settings, tokenizer))


# Seconds between two looks at a folder that another process fills.
_POLL_SECONDS = 1.0


def prepare_if_missing(data: DataConfig, process_index: int = 0) -> None:
    """Prepares `data.source` where `data.paths[0]` is no finished data set yet; without a source, nothing.

    Of several processes the first one prepares, and the others wait until the folder, which they share, is complete.
    """
    while data.source is not None and not (Path(data.paths[0]) / INDEX_FILE).exists():
        if process_index == 0:
            prepare([data.source], data.paths[0], tokenizer=data.tokenizer)
        else:
            time.sleep(_POLL_SECONDS)


def summary(output: Path, index: dict[str, Any]) -> str:
    """A line for each split, and one for what was skipped."""
    lines = [f"{output}: tokenizer {index['tokenizer']['name']}, vocabulary {index['tokenizer']['vocab_size']:,}"]
    for split in SPLITS:
        total = index["splits"][split]
        lines.append(
            f"  {split:8s} {total['tokens']:>15,} tokens {total['documents']:>12,} documents "
            f"{total['text_bytes']:>15,} bytes of text"
        )
    if index["skipped"]:
        lines.append("  skipped: " + ", ".join(f"{count:,} {reason}" for reason, count in index["skipped"].items()))
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
            f"{tokenizer}: this tokenizer names no {key.upper()} token; give its spelling with "
            f"--{key}_token, or do without with --no_{key}"
        )
    return token_id if wanted else None


def _make_folder(output: Path) -> bool:
    """Returns whether the folder is new."""
    if output.is_dir():
        if not (output / INDEX_FILE).exists() and not os.access(output, os.W_OK | os.X_OK):
            raise UserError(f"{output}: cannot be written; choose another output")
        return False
    try:
        output.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{output}: cannot be created: {error.strerror}; choose another output") from None
    return True


def _started(output: Path) -> bool:
    return (output / INDEX_FILE).exists() or any_record(output)


def _clear(output: Path) -> None:
    """Removes what an attempt left that finished no part."""
    for pattern in (MANIFEST_FILE, TOKENIZER_FILE, f"*{PARTIAL_MARK}*", *SHARD_PATTERNS):
        for path in output.glob(pattern):
            path.unlink()


def _check_manifest(output: Path, settings: Settings, files: list[InputFile]) -> None:
    """Writes down what is asked for, or compares it with what an earlier call wrote down.

    What a damaged file calls for, to fetch it again or to skip damaged files, does not touch finished parts.
    """
    path = output / MANIFEST_FILE
    asked = {
        "format": FORMAT,
        "version": VERSION,
        "settings": dataclasses.asdict(settings),
        "inputs": [dataclasses.asdict(file) for file in files],
    }
    if path.exists():
        earlier = read_json(path)
        differences = _differences(earlier, asked, _unread_inputs(output, earlier, files))
        if differences and _started(output):
            raise UserError(
                f"{output}: holds a data set prepared differently ({'; '.join(differences)}); choose another "
                "output, repeat the earlier arguments, or delete the folder to prepare it anew"
            )
        if differences:
            _clear(output)
        elif (output / INDEX_FILE).exists():
            return
    elif any(PARTIAL_MARK not in entry.name for entry in output.iterdir()):
        raise UserError(f"{output}: is neither empty nor a prepared data set; choose another output folder")
    write_json(path, asked)


def _unread_inputs(output: Path, earlier: dict[str, Any], files: list[InputFile]) -> set[str]:
    """Paths of the inputs that nothing finished was made from: no data set, no trained tokenizer, no part."""
    is_trained = earlier["settings"]["fingerprint"] is None and (output / TOKENIZER_FILE).exists()
    parts = _grouped_paths(files)
    same_parts = parts == _grouped_paths([InputFile(**file) for file in earlier["inputs"]])
    if (output / INDEX_FILE).exists() or is_trained or not same_parts:
        return set()
    return {path for number, paths in enumerate(parts) if not part_done(output, number) for path in paths}


def _grouped_paths(files: list[InputFile]) -> list[list[str]]:
    return [[file.path for file in part] for part in group_files(files)]


def _differences(earlier: dict[str, Any], asked: dict[str, Any], unread: set[str]) -> list[str]:
    """What tells the two manifests apart and would make other bytes of finished parts; inputs in `unread` made none."""
    if (earlier["format"], earlier["version"]) != (asked["format"], asked["version"]):
        return [f"format {earlier['format']} {earlier['version']}, now {asked['format']} {asked['version']}"]
    before, now = earlier["settings"], asked["settings"]
    # A tokenizer file is the same wherever it lies.
    same_file = now["fingerprint"] is not None and now["fingerprint"] == before["fingerprint"]
    # A part that was finished without skipping has no damaged file.
    skips_from_here = now["skip_corrupt"] and not before["skip_corrupt"]
    found = [
        f"{key} was {before[key]}, now {now[key]}"
        for key in now
        if before[key] != now[key]
        and not (key == "tokenizer" and same_file)
        and not (key == "skip_corrupt" and skips_from_here)
    ]
    old, new = ({file["path"]: file for file in manifest["inputs"]} for manifest in (earlier, asked))
    changes = [
        ("missing input", sorted(old.keys() - new.keys())),
        ("new input", sorted(new.keys() - old.keys())),
        ("changed input", sorted(path for path in old.keys() & new.keys() - unread if old[path] != new[path])),
    ]
    for what, paths in changes:
        if paths:
            found.append(f"{what} {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else ""))
    return found


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
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items())) or "no rows at all"
        heldout = splits["heldout"]["documents"]
        delete_records(output)
        raise UserError(
            f"{output}: the inputs hold no training text "
            f"(skipped: {reasons}; held out: {heldout} documents); "
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
    """The command `prepare`. Raises what `prepare` raises; a wrong argument exits with code 2."""
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
