"""Reading settings: what is accepted, what is refused, and the exact words."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import settings

from orthros_jax.__main__ import main as orthros_main
from orthros_jax.config import Config, ConfigError, ModelConfig
from orthros_jax.config_reader import load_config, locate, read_config, save_config, setting_types
from orthros_jax.errors import UserError, run_command

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    """Messages then name files by their bare names."""
    monkeypatch.chdir(tmp_path)


def read(text: str, *arguments: str) -> Config:
    Path("a.yaml").write_text(text, encoding="utf-8")
    return read_config(["--config", "a.yaml", *arguments])


def message(text: str, *arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        read(text, *arguments)
    return str(caught.value)


# Merging


def test_files_merge_in_order_and_overrides_win_wherever_they_stand():
    Path("a.yaml").write_text("training:\n  steps: 1\n  seed: 1\n  batch_size: 6\n")
    Path("b.yaml").write_text("training:\n  steps: 2\n  seed: 2\n")
    argv = ["--training.steps", "3", "--config", "a.yaml", "--config=b.yaml", "--data.prefetch=7"]
    config = read_config(argv)
    assert config.training == dataclasses.replace(Config().training, steps=3, seed=2, batch_size=6)
    assert config.data.prefetch == 7
    assert read_config(["--config", "b.yaml", "--config", "a.yaml"]).training.steps == 1


def test_last_of_repeated_overrides_wins():
    assert read_config(["--training.steps", "3", "--training.steps=4"]).training.steps == 4


def test_files_merge_by_setting_not_by_section():
    assert read("model:\n  kind: transformer\n", "--model.window", "5").model == ModelConfig(
        kind="transformer", window=5
    )


def test_without_a_file_the_defaults_apply():
    assert read_config(["--run_dir", "x"]) == dataclasses.replace(Config(), run_dir="x")


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "model:\n", "model:\n  # window: 3\ndata:\n"])
def test_empty_files_and_sections_change_nothing(text):
    assert read(text, "--run_dir", "x") == dataclasses.replace(Config(), run_dir="x")


# Values


@pytest.mark.parametrize(
    ("spelling", "value"),
    [
        ("1e-3", 1e-3),
        ("3e4", 3e4),
        ("1e+3", 1e3),
        ("1E3", 1e3),
        ("1.5e-3", 1.5e-3),
        ("1.e2", 100.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("2", 2.0),
        ("1_000.5", 1000.5),
        ("+3.0", 3.0),
    ],
)
def test_floats(spelling, value):
    for config in (
        read(f"optimizer:\n  learning_rate: {spelling}\n"),
        read_config(["--optimizer.learning_rate", spelling]),
    ):
        assert config.optimizer.learning_rate == value
        assert type(config.optimizer.learning_rate) is float


@pytest.mark.parametrize(("spelling", "value"), [("8", 8), ("1_000", 1000), ("010", 10), ("+4", 4)])
def test_whole_numbers(spelling, value):
    assert read(f"training:\n  steps: {spelling}\n").training.steps == value
    assert read_config(["--training.steps", spelling]).training.steps == value


def test_negative_number_after_an_option():
    assert read_config(["--mesh.data", "-1"]).mesh.data == -1


@pytest.mark.parametrize("spelling", ["off", "'off'", '"off"'])
def test_off_is_a_text(spelling):
    assert read(f"metrics:\n  wandb: {spelling}\n").metrics.wandb == "off"


@pytest.mark.parametrize(("spelling", "value"), [("true", True), ("False", False)])
def test_truth_values(spelling, value):
    assert read(f"model:\n  qk_norm: {spelling}\n").model.qk_norm is value
    assert read_config([f"--model.qk_norm={spelling}"]).model.qk_norm is value


def test_null_unsets_an_optional_setting():
    for spelling in ("null", "~", ""):
        assert read(f"model:\n  output_window: {spelling}\n").model.output_window is None
    text = "model:\n  output_window: 3\ndata:\n  paths: [a]\n  source: b\n"
    config = read(text, "--model.output_window", "null", "--data.source", "null")
    assert config.model.output_window is None
    assert config.data.source is None


def test_lists():
    assert read("data:\n  paths: [a, b]\n  weights: [1, 2e0]\n").data.weights == [1.0, 2.0]
    assert read("data:\n  paths:\n  - a\n  - '8'\n").data.paths == ["a", "8"]
    assert read_config(["--data.paths", "[a, b]"]).data.paths == ["a", "b"]
    assert read_config(["--data.paths", "a b"]).data.paths == ["a b"]
    assert read_config(["--data.paths", "8"]).data.paths == ["8"]
    assert read_config(["--data.paths", "a", "--data.weights", "1e0"]).data.weights == [1.0]
    assert read("data:\n  paths: [a]\n", "--data.paths", "[]").data.paths == []


def test_text_on_the_command_line_needs_no_quotes():
    for text in ("8", "1e-3", "true", "null", "a: b", "[a", "# a", "", "it's"):
        assert read_config(["--evaluation.sample_prompt", text]).evaluation.sample_prompt == text
    assert read_config(["--evaluation.sample_prompt=--x"]).evaluation.sample_prompt == "--x"


def test_block_text():
    assert read("evaluation:\n  sample_prompt: |\n    8\n").evaluation.sample_prompt == "8\n"


def test_byte_order_mark_is_ignored():
    Path("a.yaml").write_bytes(b"\xef\xbb\xbfrun_dir: x\n")
    assert read_config(["--config", "a.yaml"]).run_dir == "x"


# Names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "learning_rate: 1e-3\n",
            "a.yaml:1: learning_rate: no such setting; did you mean optimizer.learning_rate?",
        ),
        (
            "optimizer:\n\n  learning_rat: 1e-3\n",
            "a.yaml:3: optimizer.learning_rat: no such setting; did you mean optimizer.learning_rate?",
        ),
        (
            "optimiser:\n  beta1: 0.9\n",
            "a.yaml:1: optimiser: no such setting; did you mean optimizer?",
        ),
        (
            "learning_rat: 1e-3\n",
            "a.yaml:1: learning_rat: no such setting; did you mean optimizer.learning_rate?",
        ),
        (
            "training:\n  num-steps: 3\n",
            "a.yaml:2: training.num-steps: no such setting; did you mean training.steps?",
        ),
        (
            "model:\n  batch_size: 3\n",
            "a.yaml:2: model.batch_size: no such setting; did you mean training.batch_size?",
        ),
        (
            "every: 3\n",
            "a.yaml:1: every: no such setting; did you mean checkpoint.every or evaluation.every or metrics.every?",
        ),
        (
            "zzz: 3\n",
            "a.yaml:1: zzz: no such setting; see --help for all settings",
        ),
        (
            "8: 3\n",
            "a.yaml:1: 8: no such setting; see --help for all settings",
        ),
        (
            "model.kind: orthros\n",
            "a.yaml:1: model.kind: in a file write 'model:' and 'kind:' indented below it",
        ),
        (
            "model:\n  kind: orthros\n  window: 3\n  kind: transformer\n",
            "a.yaml:4: model.kind: set twice, first in line 2; keep one of them",
        ),
        (
            "model:\n  window: 3\ndata:\nmodel:\n  kind: orthros\n",
            "a.yaml:4: model: set twice, first in line 1; keep one of them",
        ),
        (
            "? [a, b]\n: 3\n",
            "a.yaml:1: the name of a setting must be a word",
        ),
        (
            "<<: {run_dir: x}\n",
            "a.yaml:1: <<: no such setting; see --help for all settings",
        ),
    ],
)
def test_wrong_names_in_a_file(text, expected):
    assert message(text) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--training.step", "5"],
            "command line: training.step: no such setting; did you mean training.steps?",
        ),
        (
            ["--training.batch-size=5"],
            "command line: training.batch-size: no such setting; did you mean training.batch_size?",
        ),
        (
            ["--optimiser.beta1", "5"],
            "command line: optimiser.beta1: no such setting; did you mean optimizer.beta1?",
        ),
        (
            ["--steps", "5"],
            "command line: steps: no such setting; did you mean training.steps?",
        ),
        (
            ["--model", "transformer"],
            "command line: model: no such setting; "
            "model is a section, name one of its settings, for example model.kind",
        ),
        (
            ["--print_conf"],
            "command line: print_conf: no such setting; see --help for all settings",
        ),
        (
            ["configs/a.yaml"],
            "command line: unexpected argument 'configs/a.yaml'; a file is given as --config configs/a.yaml",
        ),
        (
            ["--data.paths", "a", "b"],
            "command line: unexpected argument 'b'; settings are given as --section.key value, "
            "lists as --section.key '[a, b]'",
        ),
        (
            ["--config"],
            "command line: --config needs a file",
        ),
        (
            ["--metrics.progress", "--run_dir", "x"],
            "command line: --metrics.progress needs a value, which must be true or false",
        ),
        (
            [],
            "no settings given; start with --config configs/quickstart.yaml, and see --help for all settings",
        ),
    ],
)
def test_wrong_command_lines(arguments, expected):
    with pytest.raises(UserError) as caught:
        read_config(arguments)
    assert str(caught.value) == expected


# Types


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "training:\n  batch_size: '8'\n",
            "a.yaml:2: training.batch_size: must be a whole number, got the text '8'; remove the quotes",
        ),
        (
            'optimizer:\n  learning_rate: "1e-3"\n',
            "a.yaml:2: optimizer.learning_rate: must be a number, got the text '1e-3'; remove the quotes",
        ),
        (
            "training:\n  steps: true\n",
            "a.yaml:2: training.steps: must be a whole number, got true",
        ),
        (
            "training:\n  z_loss: false\n",
            "a.yaml:2: training.z_loss: must be a number, got false",
        ),
        (
            "training:\n  steps: 8.0\n",
            "a.yaml:2: training.steps: must be a whole number, got 8.0; write 8",
        ),
        (
            "training:\n  steps: 3e4\n",
            "a.yaml:2: training.steps: must be a whole number, got 30000.0; write 30000",
        ),
        (
            "training:\n  steps: 8.5\n",
            "a.yaml:2: training.steps: must be a whole number, got 8.5",
        ),
        (
            "training:\n  steps: many\n",
            "a.yaml:2: training.steps: must be a whole number, got the text 'many'",
        ),
        (
            "training:\n  steps: 1:30\n",
            "a.yaml:2: training.steps: must be a whole number, got the text '1:30'",
        ),
        (
            "training:\n  steps: 1.2.3\n",
            "a.yaml:2: training.steps: must be a whole number, got the text '1.2.3'",
        ),
        (
            "training:\n  seed: 9223372036854775808\n",
            "a.yaml:2: training.seed: must be a whole number, got 9223372036854775808",
        ),
        (
            "training:\n  steps:\n",
            "a.yaml:2: training.steps: must be a whole number, got null",
        ),
        (
            "training:\n  steps:\n    every: 3\n",
            "a.yaml:2: training.steps: must be a whole number, got a section",
        ),
        (
            "training:\n  steps: [8]\n",
            "a.yaml:2: training.steps: must be a whole number, got a list",
        ),
        (
            "training:\n  z_loss: .nan\n",
            "a.yaml:2: training.z_loss: must be a number, got nan",
        ),
        (
            "training:\n  z_loss: 1e999\n",
            "a.yaml:2: training.z_loss: must be a number, got inf",
        ),
        (
            "model:\n  output_window: all\n",
            "a.yaml:2: model.output_window: must be a whole number or null, got the text 'all'",
        ),
        (
            "model:\n  qk_norm: yes\n",
            "a.yaml:2: model.qk_norm: must be true or false, got the text 'yes'; write true",
        ),
        (
            "metrics:\n  progress: off\n",
            "a.yaml:2: metrics.progress: must be true or false, got the text 'off'; write false",
        ),
        (
            "model:\n  qk_norm: 1\n",
            "a.yaml:2: model.qk_norm: must be true or false, got 1",
        ),
        (
            "model:\n  kind: tranformer\n",
            "a.yaml:2: model.kind: must be one of orthros, transformer, sliding_window, "
            "got the text 'tranformer'; did you mean transformer?",
        ),
        (
            "metrics:\n  wandb: false\n",
            "a.yaml:2: metrics.wandb: must be one of off, offline, online, got false",
        ),
        (
            "run_dir: 2024\n",
            "a.yaml:1: run_dir: must be text, got 2024; put it in quotes",
        ),
        (
            "data:\n  paths: a\n",
            "a.yaml:2: data.paths: must be a list of texts, got the text 'a'; write [a]",
        ),
        (
            "data:\n  paths: [a, 8]\n",
            "a.yaml:2: data.paths: must be a list of texts, got 8 in it; put it in quotes",
        ),
        (
            "data:\n  paths: &paths [*paths]\n",
            "a.yaml:2: data.paths: must be a list of texts, got a list in it",
        ),
        (
            "data:\n  paths: [a]\n  weights: ['1']\n",
            "a.yaml:3: data.weights: must be a list of numbers, got the text '1' in it; remove the quotes",
        ),
        (
            "model: orthros\n",
            "a.yaml:1: model: is a section, its settings go indented below it; got the text 'orthros'",
        ),
        (
            "model: [kind]\n",
            "a.yaml:1: model: is a section, its settings go indented below it; got a list",
        ),
        (
            "training:\n  steps: !!int 8\n",
            "a.yaml:2: training.steps: YAML tags are not supported, remove tag:yaml.org,2002:int",
        ),
    ],
)
def test_wrong_types_in_a_file(text, expected):
    assert message(text) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--training.steps", "true"], "training.steps: must be a whole number, got true"),
        (["--training.steps", "8.5"], "training.steps: must be a whole number, got 8.5"),
        (
            ["--training.steps", "8.0"],
            "training.steps: must be a whole number, got 8.0; write 8",
        ),
        (
            ["--training.steps", "'8'"],
            "training.steps: must be a whole number, got the text '8'; remove the quotes",
        ),
        (["--training.steps", ""], "training.steps: must be a whole number, got null"),
        (["--training.steps", "{a: 1}"], "training.steps: must be a whole number, got a section"),
        (["--training.steps", "[8"], "training.steps: cannot read '[8'; must be a whole number"),
        (["--data.paths", "[a"], "data.paths: cannot read '[a'; must be a list of texts"),
        (
            ["--model.kind", "swa"],
            "model.kind: must be one of orthros, transformer, sliding_window, got the text 'swa'",
        ),
        (
            ["--model.output_window", "None"],
            "model.output_window: must be a whole number or null, got the text 'None'",
        ),
    ],
)
def test_wrong_types_on_the_command_line(arguments, expected):
    with pytest.raises(ConfigError) as caught:
        read_config(arguments)
    assert str(caught.value) == f"command line: {expected}"


# Files


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            b"model:\n  kind: orthros\n window: 3\n",
            "a.yaml:3:2: broken YAML: expected <block end>, but found",
        ),
        (
            b"model:\n\tkind: orthros\n",
            "a.yaml:2:1: broken YAML: found character '\\t' that cannot start any token",
        ),
        (b"data:\n  paths: [a\n", "a.yaml:3:1: broken YAML: expected ',' or ']', but got '<stream end>'"),
        (b"run_dir: *nothing\n", "a.yaml:1:10: broken YAML: found undefined alias 'nothing'"),
        (b"run_dir: a\n---\nrun_dir: b\n", "a.yaml:2:1: broken YAML: but found another document"),
        (
            b"run_dir: a\nmodel:\n  kind: \x00\n",
            "a.yaml:3: broken YAML: special characters are not allowed (code 0x0)",
        ),
        (b"- model\n", "a.yaml: holds a list where 'section: ...' was expected"),
        (b"orthros\n", "a.yaml: holds the text 'orthros' where 'section: ...' was expected"),
        (b"run_dir: \xe9\n", "configuration file a.yaml is not UTF-8 text (byte 9); save it as UTF-8"),
    ],
)
def test_unreadable_files(content, expected):
    Path("a.yaml").write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_config(["--config", "a.yaml"])
    # The end of the first message differs between versions of PyYAML.
    assert str(caught.value).startswith(expected)


def test_missing_file_and_folder():
    Path("folder").mkdir()
    with pytest.raises(UserError, match=r"^configuration file missing\.yaml does not exist$"):
        read_config(["--config", "missing.yaml"])
    with pytest.raises(UserError, match=r"^configuration file folder is a folder; name a YAML file in it$"):
        read_config(["--config", "folder"])


def test_file_that_cannot_be_opened(monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(UserError, match=r"^configuration file a\.yaml cannot be read: Permission denied$"):
        read_config(["--config", "a.yaml"])


# Impossible combinations


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        (
            "training:\n  batch_size: 6\n  accumulation: 4\n",
            [],
            "a.yaml:3, a.yaml:2: training.accumulation: 4 does not divide training.batch_size 6",
        ),
        (
            "model:\n  num_kv_heads: 3\n",
            ["--model.num_heads", "4"],
            "a.yaml:2, command line: model.num_kv_heads: 3 does not divide model.num_heads 4; set both together",
        ),
        (
            "model:\n  num_heads: 16\n",
            [],
            "a.yaml:2: model.num_kv_heads: 12 does not divide model.num_heads 16; set both together",
        ),
        (
            "training:\n  steps: 0\n",
            [],
            "a.yaml:2: training.steps: must be positive, got 0",
        ),
        (
            "data:\n  sequence_length: 16384\n",
            [],
            "a.yaml:2: data.sequence_length: 16384 is longer than model.max_sequence_length 8192; "
            "shorten the sequences or raise the limit",
        ),
        (
            "data:\n  paths: [a, b]\n  weights: [1]\n",
            [],
            "a.yaml:3: data.weights: 1 weights for 2 paths; give one for each path or none",
        ),
        (
            "optimizer:\n  schedule: wsd\n",
            [],
            "a.yaml:2: optimizer.decay_steps: optimizer.schedule wsd needs a decay length, got 0",
        ),
        (
            "",
            ["--model.rope_low_frequency_factor=0"],
            "command line: model.rope_low_frequency_factor: must be positive, got 0.0",
        ),
        ("run_dir: ''\n", [], "a.yaml:1: run_dir: must name a folder"),
    ],
)
def test_impossible_combinations_name_every_place(text, arguments, expected):
    assert message(text, *arguments) == expected


def test_mistakes_found_at_the_start_of_the_run_name_their_places_too():
    Path("a.yaml").write_text("mesh:\n  fsdp: 3\ntraining:\n  batch_size: 6\n")
    argv = ["--mesh.tensor", "2", "--config", "a.yaml"]
    error = locate(ConfigError("mesh", "does not make 8 devices"), argv)
    assert str(error) == "a.yaml:2, command line: mesh: does not make 8 devices"
    error = locate(ConfigError("training.batch_size", "not a multiple of mesh.data 4"), argv)
    assert str(error) == "a.yaml:4: training.batch_size: not a multiple of mesh.data 4"
    error = locate(ConfigError("model.window", "too small"), argv)
    assert str(error) == "model.window: too small"


# Placeholders of run_dir


def test_run_dir_names_other_settings():
    names = (
        "model.kind",
        "training.steps",
        "optimizer.learning_rate",
        "model.output_window",
        "model.qk_norm",
    )
    text = f"run_dir: runs/{'_'.join(f'{{{name}}}' for name in names)}\n"
    config = read(text, "--model.kind", "transformer", "--optimizer.learning_rate", "1e-3")
    assert config.run_dir == "runs/transformer_1000_0.001_null_false"
    assert read("", "--model.kind", "sliding_window").run_dir == "runs/sliding_window"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "run_dir: runs/{model.knd}\n",
            "a.yaml:1: run_dir: {model.knd} is not a setting; did you mean model.kind?",
        ),
        (
            "run_dir: runs/{kind}\n",
            "a.yaml:1: run_dir: {kind} is not a setting; did you mean model.kind?",
        ),
        (
            "run_dir: '{run_dir}'\n",
            "a.yaml:1: run_dir: a folder cannot be named after itself, remove {run_dir}",
        ),
        (
            "run_dir: 'runs/{model.kind'\n",
            "a.yaml:1: run_dir: a brace without its partner in 'runs/{model.kind'",
        ),
    ],
)
def test_wrong_placeholders(text, expected):
    assert message(text, "--model.kind", "transformer") == expected


# Saving and printing


HOSTILE_TEXTS = [
    "1e-3",
    "8",
    "true",
    "null",
    "~",
    "off",
    "",
    " a ",
    "a: b",
    "# a",
    "[a]",
    "é",
    "\n",
    "'",
    '"',
    "0x1F",
    "1:30",
]


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_saved_text_reads_back(text):
    config = read_config([f"--evaluation.sample_prompt={text}", f"--metrics.wandb_project={text}"])
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, paths=[text, "a"]))
    save_config(config, "saved.yaml")
    assert load_config("saved.yaml") == config


@pytest.mark.parametrize("value", [1e-8, 0.1 + 0.2, 5e-324, 1.7976931348623157e308, 1 / 3, 123456789.0])
def test_saved_numbers_are_exact(value):
    config = read_config([f"--optimizer.eps={value!r}"])
    save_config(config, "saved.yaml")
    assert load_config("saved.yaml").optimizer.eps == value


def test_every_setting_survives_saving():
    clashing = {"model.num_kv_heads", "model.max_sequence_length"}
    changed = {name: value for name, value in settings.PERTURBED.items() if name not in clashing}
    config = settings.make_config(settings.BASE | changed)
    save_config(config, "saved.yaml")
    assert load_config("saved.yaml") == config


def test_print_config_reads_back(capsys):
    argv = ["--model.kind", "transformer", "--data.paths", "[a, '8']", "--optimizer.learning_rate", "3e-7"]
    with pytest.raises(SystemExit) as caught:
        read_config([*argv, "--print_config"])
    assert caught.value.code == 0
    Path("printed.yaml").write_text(capsys.readouterr().out)
    assert read_config(["--config", "printed.yaml"]) == read_config(argv)


def test_help_shows_every_setting(capsys):
    with pytest.raises(SystemExit) as caught:
        read_config(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for name in setting_types():
        assert f"\n  --{name} " in shown
    assert "Sliding-window size W in keys" in shown
    assert "default: 0.0004" in shown
    assert "--model CONFIG" not in shown


# The table of perturbations that other tests sweep over


def test_perturbations_cover_every_setting_with_another_valid_value():
    assert list(settings.PERTURBED) == list(setting_types())
    base = settings.leaves(settings.make_config(settings.BASE))
    for name, value in settings.PERTURBED.items():
        if name == "model.max_sequence_length":
            with pytest.raises(ConfigError, match=r"^data\.sequence_length: 32 is longer than"):
                settings.make_config(settings.BASE | {name: value})
            continue
        changed = settings.leaves(settings.make_config(settings.BASE | {name: value}))
        assert {other for other in base if changed[other] != base[other]} == {name}


# Entry points


def test_user_error_becomes_exit_code_2(capsys):
    def command(argv):
        raise UserError(f"no {argv[0]}; bring one")

    assert run_command(command, ["data"], "prepare") == 2
    assert capsys.readouterr().err == "prepare: error: no data; bring one\n"
    assert run_command(lambda argv: None, [], "prepare") == 0
    assert run_command(lambda argv: 3, [], "prepare") == 3


def test_interrupt_becomes_exit_code_130(capsys):
    def command(argv):
        raise KeyboardInterrupt

    assert run_command(command, [], "prepare") == 130
    assert capsys.readouterr().err == "\nprepare: interrupted; the same command goes on from what is finished\n"


def run_python(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_train_reports_a_mistake_without_a_traceback():
    result = run_python("train.py", "--config", "configs/quickstart.yaml", "--training.step", "5")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "train.py: error: command line: training.step: no such setting; did you mean training.steps?\n"
    )


def test_settings_are_read_before_jax_is_imported():
    code = "import sys, train; assert 'train' in sys.modules; print('jax' in sys.modules)"
    assert run_python("-c", code).stdout == "False\n"


def test_command_table(capsys):
    assert orthros_main([]) == 2
    listed = capsys.readouterr().err
    assert orthros_main(["--help"]) == 0
    assert capsys.readouterr().out == listed
    assert "\n  prepare    turn text, JSONL or parquet into token shards\n" in listed
    assert orthros_main(["prepar"]) == 2
    assert capsys.readouterr().err == ("python -m orthros_jax: error: no command 'prepar'; did you mean prepare?\n")
    assert orthros_main(["zzz"]) == 2
    assert capsys.readouterr().err == (
        "python -m orthros_jax: error: no command 'zzz'; the commands are prepare, import, export, generate, compile, "
        "plot\n"
    )


def test_commands_exist_and_describe_themselves():
    for command in ("prepare", "plot"):
        result = run_python("-m", "orthros_jax", command, "--help")
        assert result.returncode == 0, result.stderr
        assert command in result.stdout
