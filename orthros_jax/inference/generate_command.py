"""`python -m orthros_jax generate`: continues prompts with the model of a run or of a Hugging Face folder."""

import argparse
import errno
import json
import math
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import jax
from jax.sharding import Mesh

from orthros_jax.data.storage import atomic_writer
from orthros_jax.errors import UserError
from orthros_jax.inference.engine import CacheType, Engine, inference_mesh
from orthros_jax.inference.generation import Completion, Request, check_prompt, encode_prompts, generate
from orthros_jax.inference.load import StoredModel, open_model, open_run
from orthros_jax.inference.prompts import Prompt, decode_text, read_prompts, read_text, without_line_end
from orthros_jax.inference.sampling import Sampling
from orthros_jax.sharding import check_model_divisible

PROG = "python -m orthros_jax generate"


def main(argv: list[str] | None = None) -> int:
    """The command `generate`.

    Returns:
      Exit code: 0, 130 after an interrupt, 141 where nobody reads the output any more.

    Raises:
      UserError: nothing was generated, or nothing more.
      SystemExit: with code 2 for a wrong argument.
    """
    arguments = _parse(argv)
    try:
        _run(arguments)
    except KeyboardInterrupt:
        print(f"\n{PROG}: interrupted", file=sys.stderr)
        return 130
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            "the device has not enough memory for the model and its cache; lower --capacity, --max_tokens, "
            "--batch_size or --chunk, take an 8-bit cache (--cache_dtype) or more devices (--mesh.tensor)"
        ) from error
    except BrokenPipeError:
        # Python flushes standard output once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise UserError(f"{str(error.filename)[:40]}...: a name too long for the file system; shorten it") from None
    return 0


def _run(arguments: argparse.Namespace) -> None:
    _check_model_arguments(arguments)
    prompts = _read_all_prompts(arguments)
    if arguments.output is not None:
        _check_output(Path(arguments.output))
    mesh = _mesh(arguments)
    model = _open(arguments)
    if mesh is not None:
        check_model_divisible(model.config, mesh)
    requests = _requests(prompts, model)
    capacity = _capacity(prompts, requests, arguments.capacity, model.config.max_sequence_length)
    engine = Engine(
        model.config,
        model.read(mesh),
        capacity=capacity,
        batch_size=_batch_size(len(requests), arguments),
        chunk=arguments.chunk,
        cache_dtype=arguments.cache_dtype,
        mesh=mesh,
    )
    if arguments.input is None:
        _continue_one(engine, model, requests[0], stream=arguments.stream)
    else:
        with _output_lines(arguments.output) as write:
            _continue_all(engine, model, prompts, requests, write)


# What is asked for


def _check_model_arguments(arguments: argparse.Namespace) -> None:
    if (arguments.run is None) == (arguments.model is None):
        raise UserError("give either --run DIR, a training run, or --model DIR, a Hugging Face folder")
    if arguments.step is not None and arguments.run is None:
        raise UserError("--step is a checkpoint of --run; leave it out with --model")


def _read_all_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    given = [name for name in ("prompt", "prompt_file", "input") if getattr(arguments, name) is not None]
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1]} are both given; keep one of them")
    if given and _stdin_waits():
        raise UserError(
            f"standard input holds text as well as --{given[0]}; keep one of them (`< /dev/null` is no text)"
        )
    if arguments.input is not None and arguments.stream:
        raise UserError("--stream shows one text while it grows; leave it out with --input")
    if arguments.input is None and arguments.output is not None:
        raise UserError("--output takes the lines of --input; a single text goes to standard output")
    settings = {key: getattr(arguments, key) for key in ("temperature", "top_k", "top_p", "min_p", "seed")}
    asked = {"max_tokens": arguments.max_tokens, "sampling": Sampling(**settings), "stop": tuple(arguments.stop)}
    for stop in arguments.stop:
        _check_argument("stop", stop)
    if arguments.prompt is not None:
        _check_argument("prompt", arguments.prompt)
        return [Prompt("--prompt", arguments.prompt, **asked)]
    if arguments.prompt_file is not None:
        text = without_line_end(read_text(arguments.prompt_file))
        return [Prompt(arguments.prompt_file, text, **asked)]
    if arguments.input is not None:
        return read_prompts(arguments.input, Prompt("command line", "", **asked))
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("no prompt; give --prompt TEXT, --prompt_file FILE, --input LINES, or text on standard input")
    text = without_line_end(decode_text(sys.stdin.buffer.read(), "standard input"))
    return [Prompt("standard input", text, **asked)]


def _open(arguments: argparse.Namespace) -> StoredModel:
    if arguments.run is not None:
        return open_run(arguments.run, step=arguments.step)
    return open_model(arguments.model)


def _stdin_waits() -> bool:
    """Whether text was sent to standard input: a file that is not read to its end, or a pipe with something in it."""
    try:
        handle = sys.stdin.fileno()
        kind = os.fstat(handle)
        if stat.S_ISREG(kind.st_mode):
            return os.lseek(handle, 0, os.SEEK_CUR) < kind.st_size
        if not stat.S_ISFIFO(kind.st_mode) or not select.select([handle], [], [], 0)[0]:
            return False
        # A pipe that was closed is ready to be read as well.
        return bool(sys.stdin.buffer.peek(1))  # pyright: ignore[reportAttributeAccessIssue]
    except (AttributeError, OSError, ValueError):
        return False  # closed, or no file of the system


def _check_argument(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"--{name}: not UTF-8 text; give it in UTF-8") from None


def _check_output(path: Path) -> None:
    if path.exists():
        raise UserError(f"{path}: exists already; delete it, or choose another output")
    if not path.parent.is_dir():
        raise UserError(f"{path}: {path.parent} is no folder; create it, or choose another output")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"{path}: {path.parent} cannot be written; choose another output")


def _requests(prompts: list[Prompt], model: StoredModel) -> list[Request]:
    encoded = encode_prompts(model.tokenizer, model.bos, [prompt.text for prompt in prompts])
    return [
        Request(ids, prompt.max_tokens, prompt.sampling, prompt.stop)
        for prompt, ids in zip(prompts, encoded, strict=True)
    ]


def _capacity(prompts: list[Prompt], requests: list[Request], asked: int | None, longest: int) -> int:
    """Tokens that the cache must hold of a sequence: as many as asked for, else what the requests need."""
    if asked is not None and asked < 1:
        raise UserError(f"--capacity must be positive, got {asked}")
    limit = longest if asked is None else asked
    for prompt, request in zip(prompts, requests, strict=True):
        try:
            check_prompt(len(request.prompt), limit)
        except UserError as error:
            hint = "" if asked is not None or not request.prompt else "; the model's own limit, --capacity lifts it"
            raise UserError(f"{prompt.source}: {error}{hint}") from None
    # The last token drawn is not written to the cache.
    needed = max(len(request.prompt) + request.max_tokens - 1 for request in requests)
    return min(limit, needed) if asked is None else asked


def _mesh(arguments: argparse.Namespace) -> Mesh | None:
    axes = {name: getattr(arguments, f"mesh.{name}") for name in ("data", "tensor", "context")}
    for name, size in axes.items():
        if size < 1:
            raise UserError(f"--mesh.{name} must be positive, got {size}")
    needed, there = math.prod(axes.values()), len(jax.devices())
    if needed > there:
        sizes = " x ".join(f"{name} {size}" for name, size in axes.items())
        raise UserError(f"mesh: {sizes} needs {needed} devices, but {there} are here; choose smaller axes")
    return None if needed == 1 else inference_mesh(**axes, devices=jax.devices()[:needed])


def _batch_size(requests: int, arguments: argparse.Namespace) -> int:
    """Sequences of a batch: each device along the data axis takes as many."""
    if arguments.batch_size < 1:
        raise UserError(f"--batch_size must be positive, got {arguments.batch_size}")
    data = getattr(arguments, "mesh.data")
    return -(-min(requests, arguments.batch_size) // data) * data


# What comes out


def _continue_one(engine: Engine, model: StoredModel, request: Request, *, stream: bool) -> None:
    def show(index: int, text: str) -> None:
        if stream:
            _write(text)

    (completion,), timing = generate(engine, model.tokenizer, [request], stop_ids=model.stop_ids, on_text=show)
    _write("\n" if stream else f"{completion.text}\n")
    speed = f", then {timing.tokens / timing.decoding:.1f} tokens/s" if timing.tokens else ""
    _note(
        f"{len(request.prompt):,} prompt tokens, {len(completion.tokens):,} new ones ({completion.finish_reason}); "
        f"the first after {timing.first_token:.2f} s{speed}"
    )


def _continue_all(
    engine: Engine, model: StoredModel, prompts: list[Prompt], requests: list[Request], write: Callable[[str], None]
) -> None:
    size = engine.batch_size
    for start in range(0, len(requests), size):
        batch = requests[start : start + size]
        completions, _ = generate(engine, model.tokenizer, batch, stop_ids=model.stop_ids)
        for prompt, request, completion in zip(prompts[start:], batch, completions, strict=False):
            write(_json_line(_line(prompt, request, completion)))
        _note(f"{start + len(batch):,} of {len(requests):,} prompts")


def _line(prompt: Prompt, request: Request, completion: Completion) -> dict[str, Any]:
    return {
        **prompt.extra,
        "prompt": prompt.text,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(request.prompt),
        "new_tokens": len(completion.tokens),
        "seed": request.sampling.seed,
    }


def _json_line(value: dict[str, Any]) -> str:
    """One line also for readers that break lines wherever Unicode does, such as `str.splitlines`."""
    # A lone surrogate, which UTF-8 cannot hold, becomes the escape that JSON has for it.
    line = json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()
    for separator in "\x85\u2028\u2029":
        line = line.replace(separator, f"\\u{ord(separator):04x}")
    return line + "\n"


@contextmanager
def _output_lines(path: str | None) -> Iterator[Callable[[str], None]]:
    """Writes lines to a file that appears once all are written, or to standard output."""
    if path is None:
        yield _write
        return
    with atomic_writer(Path(path)) as stream:

        def write(line: str) -> None:
            stream.write(line.encode())

        yield write


def _write(text: str) -> None:
    # In UTF-8 whatever the locale says, as the prompts are read.
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Continue prompts. The text goes to standard output, notes to standard error.",
        allow_abbrev=False,
    )
    add: Any = parser.add_argument_group("model").add_argument
    add("--run", metavar="DIR", help="folder of a training run")
    add("--step", type=int, metavar="N", help="checkpoint of the run (default: the newest that can be read)")
    add("--model", metavar="DIR", help="folder of a Llama, Qwen3 or exported Orthros in the format of Hugging Face")
    add = parser.add_argument_group("prompts (default: one text on standard input)").add_argument
    add("--prompt", metavar="TEXT", help="text to continue")
    add("--prompt_file", metavar="FILE", help="file of one text; a line break at its end is left out")
    add("--input", metavar="FILE", help="JSON lines, each with a prompt and, if it likes, settings of its own")
    add("--output", metavar="FILE", help="new file for the lines of --input (default: standard output)")
    add("--stream", action="store_true", help="show the text while it grows")
    add = parser.add_argument_group("continuation").add_argument
    add("--max_tokens", type=int, default=128, metavar="N", help="tokens to draw at most (default: 128)")
    add("--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (default: 0.8)")
    add("--top_k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens (default: 0, all)")
    add("--top_p", type=float, default=1.0, metavar="P", help="draw from the likeliest with this mass (default: 1)")
    add("--min_p", type=float, default=0.0, metavar="P", help="least share of the highest probability (default: 0)")
    add("--seed", type=int, default=0, metavar="N", help="seed; line i of --input, from 0, has N + i (default: 0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="text that ends the continuation; may be repeated")
    add = parser.add_argument_group("engine").add_argument
    add("--capacity", type=int, metavar="N", help="tokens that the cache holds of a prompt and its continuation")
    add("--batch_size", type=int, default=8, metavar="N", help="lines of --input at a time (default: 8)")
    add("--chunk", type=int, default=8192, metavar="N", help="tokens that prefill takes at a time (default: 8192)")
    add("--cache_dtype", choices=get_args(CacheType), help="8-bit cache (default: the model's compute type)")
    for axis, what in (("data", "batches"), ("tensor", "heads and widths"), ("context", "prompts")):
        add(f"--mesh.{axis}", type=int, default=1, metavar="N", help=f"devices that {what} are cut over (default: 1)")
    return parser.parse_args(argv)
