"""`python -m orthros_jax generate`: what it says, and how it ends where it cannot."""

import io
import json
import os
import shutil
import sys
from typing import Any

import numpy as np
import pytest
from run_folder import LENGTH, greedy, make_run, small_config

from orthros_jax.__main__ import main
from orthros_jax.data.kept_tokenizer import GENERATION_CONFIG_FILE
from orthros_jax.data.tokenizer import ByteTokenizer, train_bpe
from orthros_jax.errors import UserError
from orthros_jax.inference.prompts import Prompt, read_prompts
from orthros_jax.inference.sampling import Sampling

pytestmark = pytest.mark.usefixtures("compile_cache")

BOS, EOS = 256, 257
GREEDY = ["--temperature", "0"]


class _Input:
    """Standard input of a test: bytes in a pipe, or a terminal."""

    def __init__(self, content: bytes | None):
        self._handle, write = os.pipe()
        self.buffer = io.BufferedReader(io.FileIO(self._handle))
        self._is_terminal = content is None
        with os.fdopen(write, "wb") as pipe:
            pipe.write(content or b"")

    def fileno(self) -> int:
        return self._handle

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture
def command(capfdbinary, monkeypatch):
    """Returns command(arguments, stdin) -> (exit code, standard output, standard error)."""

    def command(*arguments: Any, stdin: bytes | None = None) -> tuple[int, str, str]:
        given = _Input(stdin)
        monkeypatch.setattr(sys, "stdin", given)
        try:
            code = main(["generate", *map(str, arguments)])
        finally:
            given.buffer.close()
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return command


@pytest.fixture
def says(command, run_dir):
    """Returns says(arguments, stdin) -> text, for a call that succeeds on the run."""

    def says(*arguments, stdin=None):
        code, out, err = command("--run", run_dir, *arguments, stdin=stdin)
        assert code == 0, err
        return out

    return says


@pytest.fixture
def fails(command, run_dir, tmp_path):
    """Returns fails(arguments, stdin) -> message; it must print one line and leave nothing behind."""

    def fails(*arguments, stdin=None, model=None):
        before = sorted(tmp_path.rglob("*"))
        code, out, err = command(*(("--run", run_dir) if model is None else model), *arguments, stdin=stdin)
        assert (code, out) == (2, "")
        assert err.endswith("\n")
        (line,) = err.splitlines()
        assert sorted(tmp_path.rglob("*")) == before
        return line.removeprefix("python -m orthros_jax generate: error: ")

    return fails


def expected(params, prompt: str, max_tokens: int) -> str:
    return ByteTokenizer().decode(greedy(small_config(), params, [BOS, *prompt.encode()], max_tokens))


# What it says


def test_a_prompt_is_continued_with_its_likeliest_tokens(command, run_dir, params):
    code, out, err = command("--run", run_dir, *GREEDY, "--max_tokens", 12, stdin=b"the dog\n")
    assert (code, out) == (0, f"{expected(params[8], 'the dog', 12)}\n")
    (note,) = err.splitlines()
    assert note.startswith("8 prompt tokens, 12 new ones (length); the first after ")
    assert note.endswith(" tokens/s")


def test_a_stream_of_a_named_step_and_a_file(says, params, tmp_path, monkeypatch):
    pieces = []
    monkeypatch.setattr("orthros_jax.inference.generate_command._write", pieces.append)
    file = tmp_path / "prompt.txt"
    file.write_bytes("\ufeffthe dog\r\n".encode())
    says(*GREEDY, "--step", 4, "--prompt_file", file, "--max_tokens", 12, "--stream")
    assert "".join(pieces) == f"{expected(params[4], 'the dog', 12)}\n"
    assert len(pieces) > 4
    assert expected(params[4], "the dog", 12) != expected(params[8], "the dog", 12)


def test_averaged_parameters_are_taken_where_the_run_has_them(command, params, tmp_path):
    config = small_config(optimizer__ema_decay=0.5)
    folder = make_run(tmp_path / "run", {3: {"params": params[4], "ema": params[8]}}, config)
    _, out, _ = command("--run", folder, *GREEDY, "--prompt", "the dog", "--max_tokens", 12)
    assert out == f"{expected(params[8], 'the dog', 12)}\n"


def test_stop_tokens_of_a_generation_config_and_a_full_cache(command, run_dir, params, tmp_path):
    folder = shutil.copytree(run_dir, tmp_path / "run")
    tokens = greedy(small_config(), params[8], [BOS, *b"the dog"], 12)
    stop = next(n for n in range(3, 12) if tokens[n] not in tokens[:n])
    (folder / GENERATION_CONFIG_FILE).write_text(json.dumps({"eos_token_id": [EOS, tokens[stop]]}))
    _, out, err = command("--run", folder, *GREEDY, "--prompt", "the dog", "--max_tokens", 12)
    assert out == ByteTokenizer().decode(tokens[:stop]) + "\n"
    assert f"{stop + 1} new ones (stop)" in err
    _, out, err = command("--run", run_dir, *GREEDY, "--prompt", "the dog", "--capacity", 19)
    assert out == ByteTokenizer().decode(tokens) + "\n"
    assert "12 new ones (capacity)" in err


def test_lines_in_and_lines_out(says, tmp_path):
    """Settings of a line win; its text depends on its seed alone, not on its batch; nothing else is written."""
    source, target, engine = tmp_path / "in.jsonl", tmp_path / "out.jsonl", ["--batch_size", 2, "--capacity", LENGTH]
    lines = [
        {"prompt": "the dog", "id": {"any": "thing\ud800"}},
        {"prompt": "the dog", "temperature": 0, "max_tokens": 6},
        {"prompt": "é🦊\u2028\x85", "top_k": 3, "top_p": 0.9, "min_p": 0.01, "seed": 77, "id": 3},
        {"prompt": "the dog", "seed": 40, "max_tokens": 30},
        {"prompt": "a long prompt, of more tokens than others", "stop": ["zzz", "yyy"]},
    ]
    source.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    assert says("--input", source, "--output", target, "--max_tokens", 10, "--seed", 40, *engine) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["prompt"] for line in found] == [line["prompt"] for line in lines]
    assert [line.get("id") for line in found] == [{"any": "thing\ud800"}, None, 3, None, None]
    assert [line["seed"] for line in found] == [40, 41, 77, 40, 44]
    assert [line["prompt_tokens"] for line in found] == [8, 8, 12, 8, 42]
    assert [line["new_tokens"] for line in found] == [10, 6, 10, 30, 10]
    assert [line["finish_reason"] for line in found] == ["length"] * 5
    assert found[3]["text"].startswith(found[0]["text"].rstrip("\ufffd"))
    assert not found[1]["text"].startswith(found[0]["text"][:4])
    again = lines[2] | {"stop": found[2]["text"][2:4]}
    source.write_text("".join(json.dumps(line) + "\n" for line in (again, {"prompt": "x"}, lines[0] | {"seed": 40})))
    shown = [json.loads(line) for line in says("--input", source, "--max_tokens", 10, *engine).splitlines()]
    assert shown[0]["finish_reason"] == "stop"
    assert shown[0]["text"] == found[2]["text"][: found[2]["text"].index(again["stop"])]
    assert shown[2] == found[0]


@pytest.mark.parametrize(
    "options",
    [
        ("--mesh.tensor", 2, "--mesh.data", 2),
        ("--mesh.context", 2, "--chunk", 256),
        ("--cache_dtype", "int8", "--batch_size", 1),
    ],
)
def test_a_mesh_and_an_8_bit_cache_say_the_same(says, params, tmp_path, options):
    """With these weights the likeliest token is far ahead of what an 8-bit cache changes."""
    source, prompts = tmp_path / "in.jsonl", ("the dog", "a", "two heads")
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    out = says("--input", source, *GREEDY, "--max_tokens", 8, *options)
    assert [json.loads(line)["text"] for line in out.splitlines()] == [expected(params[8], p, 8) for p in prompts]


def test_an_exported_model_says_what_the_run_says(command, run_dir, says, tmp_path, capfdbinary):
    assert main(["export", "--run", str(run_dir), "--output", str(tmp_path / "model"), "--dtype", "float32"]) == 0
    capfdbinary.readouterr()
    options = (*GREEDY, "--prompt", "the dog", "--max_tokens", 12)
    code, out, err = command("--model", tmp_path / "model", *options)
    assert code == 0, err
    # An exported model computes in bfloat16, the run in float32; the likeliest token is far ahead of the difference.
    assert out == says(*options)


def test_an_interrupt(command, run_dir, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("orthros_jax.inference.generate_command.generate", interrupt)
    code, _, err = command("--run", run_dir, "--prompt", "a")
    assert (code, err) == (130, "\npython -m orthros_jax generate: interrupted\n")


# What it refuses


def test_no_model(fails):
    either = "give either --run DIR, a training run, or --model DIR, a Hugging Face folder"
    assert fails("--prompt", "a", model=()) == either
    assert fails("--prompt", "a", "--model", "x") == either
    assert fails("--prompt", "a", "--step", 3, model=("--model", "x")) == (
        "--step is a checkpoint of --run; leave it out with --model"
    )


def test_an_unknown_folder(fails, tmp_path):
    missing = tmp_path / "missing"
    assert fails("--prompt", "a", model=("--run", missing)) == (
        f"{missing}: no such folder; name the run_dir of a training run"
    )
    assert fails("--prompt", "a", model=("--model", missing)) == (
        f"{missing}: no such folder; name a folder with config.json and safetensors files"
    )


def test_a_folder_that_is_no_run(fails, tmp_path, run_dir):
    (tmp_path / "empty").mkdir()
    assert fails("--prompt", "a", model=("--run", tmp_path / "empty")) == (
        f"{tmp_path / 'empty'}: no config.yaml here, so this is no run; name the run_dir of a training run"
    )
    shutil.copy(run_dir / "config.yaml", tmp_path / "empty")
    assert fails("--prompt", "a", model=("--run", tmp_path / "empty")) == (
        f"{tmp_path / 'empty'}: no checkpoint in this run; train it until one is saved"
    )


def test_a_step_that_is_not_there(fails, run_dir):
    assert fails("--prompt", "a", "--step", 5) == (
        f"{run_dir / 'checkpoints'}: no checkpoint of step 5; the steps are 4, 8"
    )


def test_a_damaged_step(fails, command, run_dir, params, tmp_path):
    """The newest one that can be read is taken, unless the damaged one is named."""
    folder = shutil.copytree(run_dir, tmp_path / "run")
    step = folder / "checkpoints" / "8"
    largest = max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    largest.write_bytes(content)
    message = fails("--prompt", "a", "--step", 8, model=("--run", folder))
    assert message.startswith(f"checkpoint {step} cannot be read: ")
    assert message.endswith("; take another step")
    _, out, err = command("--run", folder, *GREEDY, "--prompt", "the dog", "--max_tokens", 12)
    assert out == f"{expected(params[4], 'the dog', 12)}\n"
    assert err.startswith(f"skipped checkpoint {step}: ")


def test_a_tokenizer_that_is_missing_or_too_large(fails, run_dir, tmp_path):
    folder = shutil.copytree(run_dir, tmp_path / "run")
    tokenizer = folder / "tokenizer.json"
    tokenizer.unlink()
    assert fails("--prompt", "a", model=("--run", folder)) == (
        f"{folder}: tokenizer missing: no tokenizer.json here; copy the one of the original model to this place"
    )
    tokenizer.write_bytes(train_bpe(["the dog has two heads " * 5], 270))
    assert fails("--prompt", "a", model=("--run", folder)) == (
        f"{tokenizer}: has 270 entries, more than the 260 of the model; put the tokenizer that it was trained with in "
        "this place"
    )


@pytest.mark.parametrize("ids", ["</s>", [1.5], True])
def test_stop_tokens_that_are_none(fails, run_dir, tmp_path, ids):
    folder = shutil.copytree(run_dir, tmp_path / "run")
    path = folder / GENERATION_CONFIG_FILE
    path.write_text(json.dumps({"eos_token_id": ids}))
    assert fails("--prompt", "a", model=("--run", folder)) == (
        f"{path}: eos_token_id must be a token id or a list of them; repair it or move it away"
    )


@pytest.mark.parametrize("content", ["{", "[257]"])
def test_a_generation_config_that_is_none(fails, run_dir, tmp_path, content):
    folder = shutil.copytree(run_dir, tmp_path / "run")
    path = folder / GENERATION_CONFIG_FILE
    path.write_text(content)
    assert fails("--prompt", "a", model=("--run", folder)) == (
        f"{path}: not a generation configuration; repair it or move it away"
    )


def test_more_memory_than_there_is(fails):
    assert fails("--prompt", "a", "--capacity", 10**13) == (
        "the device has not enough memory for the model and its cache; lower --capacity, --max_tokens, --batch_size "
        "or --chunk, take an 8-bit cache (--cache_dtype) or more devices (--mesh.tensor)"
    )


def test_names_too_long(fails, tmp_path):
    message = f"{'a' * 40}...: a name too long for the file system; shorten it"
    assert fails("--prompt", "a", model=("--run", "a" * 5000)) == message


def test_no_prompt(fails):
    assert fails() == ("no prompt; give --prompt TEXT, --prompt_file FILE, --input LINES, or text on standard input")


@pytest.mark.parametrize(
    ("options", "stdin", "source"),
    [(["--prompt", ""], None, "--prompt"), ([], b"", "standard input"), ([], b"\n", "standard input")],
)
def test_an_empty_prompt(fails, options, stdin, source):
    assert fails(*options, stdin=stdin) == f"{source}: the prompt is empty; give at least one character"


def test_two_prompts(fails, tmp_path):
    assert fails("--prompt", "a", "--input", tmp_path / "x") == (
        "--prompt and --input are both given; keep one of them"
    )
    assert fails("--prompt", "a", stdin=b"b") == (
        "standard input holds text as well as --prompt; keep one of them (`< /dev/null` is no text)"
    )


@pytest.mark.parametrize(("size", "more"), [(12, ["--capacity", 12]), (LENGTH, [])])
def test_a_prompt_longer_than_the_cache(fails, size, more):
    hint = "" if more else "; the model's own limit, --capacity lifts it"
    assert fails("--prompt", "a" * size, *more) == (
        f"--prompt: a sequence of {size + 1} tokens does not fit the cache, whose capacity is {size} tokens (prompt "
        f"and generated together); make the cache larger, shorten the prompt or generate less{hint}"
    )


def test_text_that_is_not_utf_8(fails, tmp_path):
    assert fails(stdin=b"caf\xe9") == "standard input: not UTF-8 text (byte 3); convert it to UTF-8"
    for option in ("--prompt_file", "--input"):
        file = tmp_path / "latin"
        file.write_bytes(b"caf\xe9")
        assert fails(option, file) == f"{file}: not UTF-8 text (byte 3); convert it to UTF-8"
    assert fails("--prompt", "caf\udce9") == "--prompt: not UTF-8 text; give it in UTF-8"


@pytest.mark.parametrize("option", ["--prompt_file", "--input"])
def test_files_that_cannot_be_read(fails, tmp_path, option):
    assert fails(option, tmp_path / "no") == f"{tmp_path / 'no'}: cannot be read: No such file or directory"
    assert fails(option, tmp_path) == f"{tmp_path}: cannot be read: Is a directory"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "broken JSON: Expecting ',' delimiter: line 1 column 15 (char 14)"),
        ("[" * 100_000, "broken JSON: nested too deeply"),
        ('"a"', 'must be an object with a "prompt", as {"prompt": "..."}'),
        ('{"text": "a"}', 'must be an object with a "prompt", as {"prompt": "..."}'),
        ('{"prompt": 5}', '"prompt" must be text'),
        ('{"prompt": null}', '"prompt" must be text'),
        ('{"prompt": "a", "prompt": "b"}', '"prompt" stands twice'),
        ('{"prompt": "a", "temprature": 1}', 'no setting "temprature"; did you mean "temperature"?'),
        (
            '{"prompt": "a", "x": 1}',
            'no setting "x"; a line may have prompt, id, max_tokens, stop, temperature, top_k, top_p, min_p, seed',
        ),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be positive, got 0"),
        ('{"prompt": "a", "max_tokens": 2.0}', '"max_tokens" must be a whole number, got 2.0'),
        ('{"prompt": "a", "max_tokens": true}', '"max_tokens" must be a whole number, got true'),
        ('{"prompt": "a", "temperature": "hot"}', '"temperature" must be a number, got "hot"'),
        (
            '{"prompt": "a", "temperature": 1' + "0" * 400 + "}",
            '"temperature" must be a number, got 1' + "0" * 39 + "...",
        ),
        ('{"prompt": "a", "temperature": -1}', "temperature must be 0 (greedy) or a positive number, got -1.0"),
        ('{"prompt": "a", "temperature": NaN}', "temperature must be 0 (greedy) or a positive number, got nan"),
        ('{"prompt": "a", "top_p": 0}', "top_p must be above 0 and at most 1 (off), got 0.0"),
        ('{"prompt": "a", "stop": 5}', '"stop" must be text or a list of texts'),
        ('{"prompt": "a", "stop": ["a", 5]}', '"stop" must be text or a list of texts'),
        ('{"prompt": "a", "stop": ""}', "a stop string must not be empty"),
    ],
)
def test_a_line_that_is_wrong(tmp_path, line, message):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "good"}\n\n' + line + "\n")
    with pytest.raises(UserError) as error:
        read_prompts(str(source), Prompt("command line", "", 10, Sampling(), ()))
    assert str(error.value) == f"{source}:3: {message}"


def test_a_wrong_line_leaves_no_output(fails, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "good"}\n{"prompt": ""}\n')
    assert fails("--input", source, "--output", tmp_path / "out.jsonl") == (
        f"{source}:2: the prompt is empty; give at least one character"
    )


def test_a_file_without_lines(fails, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("\n \n")
    assert fails("--input", source) == (
        f'{source}: no prompt in this file; write one JSON object a line, as {{"prompt": "..."}}'
    )


def test_an_output_that_cannot_be_written(fails, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    target.write_text("kept")
    assert fails("--input", source, "--output", target) == (
        f"{target}: exists already; delete it, or choose another output"
    )
    assert target.read_text() == "kept"
    away = tmp_path / "no" / "out.jsonl"
    assert fails("--input", source, "--output", away) == (
        f"{away}: {away.parent} is no folder; create it, or choose another output"
    )
    assert fails("--prompt", "a", "--output", away) == (
        "--output takes the lines of --input; a single text goes to standard output"
    )
    assert fails("--input", source, "--stream") == ("--stream shows one text while it grows; leave it out with --input")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max_tokens", 0, "max_tokens must be positive, got 0"),
        ("--top_p", 2, "top_p must be above 0 and at most 1 (off), got 2.0"),
        ("--stop", "", "a stop string must not be empty"),
        ("--capacity", 0, "--capacity must be positive, got 0"),
        ("--batch_size", 0, "--batch_size must be positive, got 0"),
        ("--mesh.data", 0, "--mesh.data must be positive, got 0"),
        ("--mesh.tensor", 3, "mesh.tensor: 3 does not divide model.num_heads 4; choose a divisor of it"),
        (
            "--mesh.tensor",
            16,
            "mesh: data 1 x tensor 16 x context 1 needs 16 devices, but 8 are here; choose smaller axes",
        ),
    ],
)
def test_a_setting_out_of_range(fails, option, value, message):
    assert fails("--prompt", "a", option, value) == message


def test_weights_that_are_not_finite_leave_no_output(fails, params, tmp_path):
    broken = params[4] | {"final_norm": {"scale": np.full(16, np.nan, np.float32)}}
    folder = make_run(tmp_path / "run", {1: {"params": broken}}, small_config())
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    assert fails(
        "--input", source, "--output", tmp_path / "out.jsonl", "--max_tokens", 20, model=("--run", folder)
    ) == ("the model's scores are not finite: its weights are damaged, or too large for the compute or cache type")
