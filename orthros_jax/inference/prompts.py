"""What `generate` is asked for: prompts from the command line, from files and from JSON lines, checked."""

import dataclasses
import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orthros_jax.data.tokenizer import clean_text
from orthros_jax.errors import UserError
from orthros_jax.inference.sampling import Sampling

_SAMPLING = {field.name: field.type for field in dataclasses.fields(Sampling)}
_KEYS = ("prompt", "id", "max_tokens", "stop", *_SAMPLING)


@dataclass(frozen=True)
class Prompt:
    """A text to continue.

    Attributes:
      source: where it stands, for messages: an option, "standard input", or file and line.
      text: the text.
      max_tokens, sampling, stop: as in `orthros_jax.inference.generation.Request`.
      extra: what goes into the line of output unchanged: the "id", if there is one.

    Raises:
      UserError: `max_tokens` or a stop string is of no use.
    """

    source: str
    text: str
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.max_tokens < 1:
            raise UserError(f"max_tokens must be positive, got {self.max_tokens}")
        if not all(self.stop):
            raise UserError("a stop string must not be empty")


def read_text(path: str) -> str:
    """The text of a file.

    Raises:
      UserError: it cannot be read or is not UTF-8.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return decode_text(content, path)


def decode_text(content: bytes, source: str) -> str:
    """UTF-8 to text.

    Raises:
      UserError: it is not UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 text (byte {error.start}); convert it to UTF-8") from None


def without_line_end(text: str) -> str:
    """The text without one line break at its end, which editors and `echo` add."""
    return re.sub(r"\r?\n\Z", "", text)


def read_prompts(path: str, default: Prompt) -> list[Prompt]:
    """The prompts of a JSON lines file: objects with "prompt" and settings of their own.

    Args:
      default: settings where a line gives none. Line i, from 0, has the seed of `default` plus i, so that equal prompts
        differ.

    Raises:
      UserError: a line is wrong, or there is none; the message names it.
    """
    prompts = []
    for source, line in _lines(path):
        try:
            prompts.append(_read_prompt(line, source, default, len(prompts)))
        except UserError as error:
            raise UserError(f"{source}: {error}") from None
    if not prompts:
        raise UserError(f'{path}: no prompt in this file; write one JSON object a line, as {{"prompt": "..."}}')
    return prompts


def _lines(path: str) -> Iterator[tuple[str, str]]:
    # Not splitlines: JSON strings may hold other line separators of Unicode.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            yield f"{path}:{number}", line


def _read_prompt(line: str, source: str, default: Prompt, index: int) -> Prompt:
    try:
        given = json.loads(line, object_pairs_hook=_object)
    except ValueError as error:
        raise UserError(f"broken JSON: {error}") from None
    except RecursionError:
        raise UserError("broken JSON: nested too deeply") from None
    if not isinstance(given, dict) or "prompt" not in given:
        raise UserError('must be an object with a "prompt", as {"prompt": "..."}')
    for key in given:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            raise UserError(f'no setting "{key}"; ' + (f'did you mean "{near[0]}"?' if near else _known()))
    if not isinstance(given["prompt"], str):
        raise UserError('"prompt" must be text')
    seed = (default.sampling.seed + index) % 2**32
    values = {**vars(default.sampling), "seed": seed}
    for key in _SAMPLING.keys() & given.keys():
        values[key] = _number(key, given[key], whole=_SAMPLING[key] is int)
    stop = given.get("stop", default.stop)
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(s, str) for s in stop):
        raise UserError('"stop" must be text or a list of texts')
    return Prompt(
        source,
        clean_text(given["prompt"]),
        _number("max_tokens", given.get("max_tokens", default.max_tokens), whole=True),
        Sampling(**values),
        tuple(stop),
        {key: given[key] for key in ("id",) if key in given},
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise UserError(f'"{next(name for name in names if names.count(name) > 1)}" stands twice')
    return found


def _number(key: str, value: Any, whole: bool) -> Any:
    wrong = UserError(f'"{key}" must be a {"whole " if whole else ""}number, got {_shortened(json.dumps(value))}')
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise wrong
    try:
        return value if whole else float(value)
    except OverflowError:
        raise wrong from None


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


def _known() -> str:
    return f"a line may have {', '.join(_KEYS)}"
