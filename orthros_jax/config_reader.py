"""Reads a `Config` from YAML files and command-line overrides.

YAML is read more strictly than PyYAML does it: the declared type of a setting decides, a quoted number is
text, and a key that stands twice is an error. Each value keeps the place where it was given, so that every
message can name it. Checked values go to jsonargparse, which builds the dataclasses and writes the help.
Nothing here imports JAX: a mistake in the settings ends a run at once.
"""

import dataclasses
import difflib
import math
import re
import types
from argparse import SUPPRESS
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from orthros_jax.config import Config, ConfigError, to_dict
from orthros_jax.errors import UserError

COMMAND_LINE = "command line"
_SECTIONS = {name: hint for name, hint in get_type_hints(Config).items() if dataclasses.is_dataclass(hint)}
# Plain scalars as in YAML 1.2. PyYAML reads YAML 1.1, where `1e-3` is text, `010` is 8, `1:30` is 90 and
# `off` is false.
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}


@dataclasses.dataclass(frozen=True)
class _Setting:
    value: Any
    source: str
    """File and line, or COMMAND_LINE."""


def setting_types() -> dict[str, Any]:
    """Dotted name of every setting and its declared type, in the order of the dataclasses."""
    declared = {}
    for name, hint in get_type_hints(Config).items():
        if name in _SECTIONS:
            declared |= {f"{name}.{leaf}": leaf_hint for leaf, leaf_hint in get_type_hints(hint).items()}
        else:
            declared[name] = hint
    return declared


_TYPES = setting_types()


def read_config(argv: Sequence[str], prog: str = "train.py") -> Config:
    """The configuration that a command line asks for.

    Files given with `--config` merge in their order, and `--section.key value` wins over all of them,
    wherever it stands. Settings that nobody gives keep their defaults.

    Raises:
      UserError: on any mistake; the message names the setting, the place where it was given and the fix.
      SystemExit: with code 0, after `--help` or `--print_config` has printed.
    """
    files, overrides, flags = _split_arguments(argv)
    if "help" in flags:
        _parser(prog).print_help()
        raise SystemExit(0)
    settings = _merge(files, overrides)
    config = _build(settings)
    run_dir_source = settings["run_dir"].source if "run_dir" in settings else ""
    config = dataclasses.replace(config, run_dir=_fill_placeholders(config, run_dir_source))
    if "print_config" in flags:
        print(_dump(config), end="")
        raise SystemExit(0)
    return config


def locate(error: ConfigError, argv: Sequence[str]) -> ConfigError:
    """`error`, found only when the run started, with the places of the settings that it names."""
    files, overrides, _ = _split_arguments(argv)
    return _located(error, _merge(files, overrides))


def load_config(path: str | Path) -> Config:
    """Reads back what `save_config` wrote.

    Raises:
      UserError: if the file cannot be read or holds an invalid setting.
    """
    return _build(_read_file(str(path)))


def save_config(config: Config, path: str | Path) -> None:
    """Writes all settings as YAML; `load_config` gives an equal Config."""
    beside = Path(f"{path}.tmp")
    beside.write_text(_dump(config), encoding="utf-8")
    beside.replace(path)


def _split_arguments(argv: Sequence[str]) -> tuple[list[str], dict[str, _Setting], set[str]]:
    files, overrides, flags = [], {}, set()
    arguments = list(argv)
    if not arguments:
        raise UserError(
            "no settings given; start with --config configs/quickstart.yaml, and see --help for all settings"
        )
    while arguments:
        argument = arguments.pop(0)
        if argument in ("-h", "--help", "--print_config"):
            flags.add("help" if argument != "--print_config" else "print_config")
            continue
        if not argument.startswith("--"):
            fix = (
                f"a file is given as --config {argument}"
                if argument.endswith((".yaml", ".yml"))
                else "settings are given as --section.key value, lists as --section.key '[a, b]'"
            )
            raise UserError(f"{COMMAND_LINE}: unexpected argument {argument!r}; {fix}")
        name, equals, text = argument[2:].partition("=")
        if name != "config" and name not in _TYPES:
            raise _unknown_setting(name, COMMAND_LINE)
        if not equals:
            if not arguments or arguments[0].startswith("--"):
                needed = "a file" if name == "config" else f"a value, which {_expected(_TYPES[name])}"
                raise UserError(f"{COMMAND_LINE}: --{name} needs {needed}")
            text = arguments.pop(0)
        if name == "config":
            files.append(text)
        else:
            overrides[name] = _Setting(_parse_override(name, text), COMMAND_LINE)
    return files, overrides, flags


def _merge(files: Sequence[str], overrides: dict[str, _Setting]) -> dict[str, _Setting]:
    settings: dict[str, _Setting] = {}
    for path in files:
        settings |= _read_file(path)
    return settings | overrides


def _parse_override(name: str, text: str) -> Any:
    """A value from the command line, where text needs no quotes and one value may stand for a list."""
    declared, optional = _unwrap_optional(_TYPES[name])
    if declared is str or get_origin(declared) is Literal:
        return _checked(name, None if optional and text == "null" else text, COMMAND_LINE)
    is_list = get_origin(declared) is list
    if is_list and not text.startswith("["):
        (element,) = get_args(declared)
        return _checked(name, [text if element is str else _resolve_plain(text)], COMMAND_LINE)
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError:
        raise ConfigError(name, f"cannot read {text!r}; {_expected(_TYPES[name])}", COMMAND_LINE) from None
    return _checked(name, None if node is None else _plain_value(node, name, COMMAND_LINE), COMMAND_LINE)


def _read_file(path: str) -> dict[str, _Setting]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"configuration file {path} does not exist") from None
    except IsADirectoryError:
        raise UserError(f"configuration file {path} is a folder; name a YAML file in it") from None
    except UnicodeDecodeError as error:
        raise UserError(f"configuration file {path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"configuration file {path} cannot be read: {error.strerror}") from None
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise UserError(f"{where}: broken YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{path}:{line}: broken YAML: {error.reason} (code {error.character:#x})") from None
    if root is None or _is_empty(root):
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path}: holds {_describe(_plain_value(root, '', path))} where 'section: ...' was expected")
    return dict(_walk(root, path))


def _walk(mapping: yaml.MappingNode, path: str, prefix: str = "") -> Iterator[tuple[str, _Setting]]:
    """Checked settings of a YAML mapping, which is the whole file or one section of it."""
    lines: dict[str, int] = {}
    for key_node, value_node in mapping.value:
        line = key_node.start_mark.line + 1
        source = f"{path}:{line}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError(f"{source}: the name of a setting must be a word")
        name = prefix + key_node.value
        if name in lines:
            raise ConfigError(name, f"set twice, first in line {lines[name]}; keep one of them", source)
        lines[name] = line
        if "." in key_node.value and name in _TYPES:
            section, _, leaf = name.rpartition(".")
            raise ConfigError(name, f"in a file write '{section}:' and '{leaf}:' indented below it", source)
        if name in _SECTIONS:
            if _is_empty(value_node):
                continue
            if not isinstance(value_node, yaml.MappingNode):
                got = _describe(_plain_value(value_node, name, source))
                raise ConfigError(name, f"is a section, its settings go indented below it; got {got}", source)
            yield from _walk(value_node, path, f"{name}.")
        elif name in _TYPES:
            yield name, _Setting(_checked(name, _plain_value(value_node, name, source), source), source)
        else:
            raise _unknown_setting(name, source)


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value == ""


def _plain_value(node: yaml.Node, name: str, source: str) -> Any:
    """The Python value that a YAML node spells; a mapping, which no setting takes, becomes an empty dict."""
    if isinstance(node, yaml.MappingNode):
        return {}
    if node.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:seq"):
        raise ConfigError(name, f"YAML tags are not supported, remove {node.tag}", source)
    if isinstance(node, yaml.SequenceNode):
        # No setting is a list of lists, and a YAML anchor can make a list its own element.
        return [
            [] if isinstance(element, yaml.SequenceNode) else _plain_value(element, name, source)
            for element in node.value
        ]
    assert isinstance(node, yaml.ScalarNode)
    return node.value if node.style else _resolve_plain(node.value)


def _resolve_plain(text: str) -> Any:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _unwrap_optional(declared: Any) -> tuple[Any, bool]:
    if get_origin(declared) not in (Union, types.UnionType):
        return declared, False
    (inner,) = (option for option in get_args(declared) if option is not type(None))
    return inner, True


def _expected(declared: Any) -> str:
    inner, optional = _unwrap_optional(declared)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    if get_origin(inner) is Literal:
        text = "one of " + ", ".join(get_args(inner))
    elif get_origin(inner) is list:
        (element,) = get_args(inner)
        text = {str: "a list of texts", float: "a list of numbers", int: "a list of whole numbers"}[element]
    else:
        text = names[inner]
    return f"must be {text}{' or null' if optional else ''}"


def _describe(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return f"the text {value!r}"
        case dict():
            return "a section"
        case list():
            return "a list"
        case _:
            return repr(value)


def _checked(name: str, value: Any, source: str) -> Any:
    """`value` as the declared type of the setting, without any conversion that could hide a mistake."""
    declared = _TYPES[name]
    inner, optional = _unwrap_optional(declared)
    if value is None and optional:
        return None
    wrong = ConfigError(name, f"{_expected(declared)}, got {_describe(value)}{_repair(value, inner)}", source)
    if get_origin(inner) is Literal:
        if isinstance(value, str) and value in get_args(inner):
            return value
        raise wrong
    if get_origin(inner) is not list:
        if not _has_type(value, inner):
            raise wrong
        return inner(value)
    (element,) = get_args(inner)
    if not isinstance(value, list):
        raise wrong
    for item in value:
        if not _has_type(item, element):
            raise ConfigError(
                name, f"{_expected(declared)}, got {_describe(item)} in it{_repair(item, element)}", source
            )
    return [element(item) for item in value]


def _has_type(value: Any, declared: type) -> bool:
    match value:
        case bool():
            return declared is bool
        case int():
            return declared in (int, float) and abs(value) < 2**63
        case float():
            return declared is float and math.isfinite(value)
        case _:
            return isinstance(value, declared)


def _repair(value: Any, declared: Any) -> str:
    """How to turn `value` into what a setting takes, as the end of a message; empty if nobody can tell."""
    if isinstance(value, str) and declared in (int, float) and isinstance(_resolve_plain(value), int | float):
        return "; remove the quotes"
    if isinstance(value, str) and declared is bool and value.lower() in ("yes", "on", "no", "off"):
        return f"; write {'true' if value.lower() in ('yes', 'on') else 'false'}"
    if isinstance(value, str) and get_origin(declared) is Literal:
        return _did_you_mean(difflib.get_close_matches(value, get_args(declared), n=1))
    if isinstance(value, float) and declared is int and value.is_integer():
        return f"; write {int(value)}"
    if declared is str and isinstance(value, int | float):
        return "; put it in quotes"
    if get_origin(declared) is list and isinstance(value, str | int | float):
        return f"; write [{value}]"
    return ""


def _did_you_mean(names: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


def _suggestion(name: str) -> str:
    """The end of a message about an unknown name: where the name exists, or the nearest ones."""
    if name in _SECTIONS:
        example = next(known for known in _TYPES if known.startswith(f"{name}."))
        return f"; {name} is a section, name one of its settings, for example {example}"
    section, _, leaf = name.rpartition(".")
    same_leaf = [known for known in _TYPES if known.rpartition(".")[2] == leaf]
    if same_leaf:
        return _did_you_mean(same_leaf)
    siblings = {known.rpartition(".")[2]: known for known in _TYPES if known.rpartition(".")[0] == section}
    whole_names = {known: known for known in (*_TYPES, *_SECTIONS)}
    leaves = {known.rpartition(".")[2]: known for known in _TYPES}
    for wrong, candidates, cutoff in ((leaf, siblings, 0.6), (name, whole_names, 0.75), (leaf, leaves, 0.6)):
        near = difflib.get_close_matches(wrong, candidates, n=1, cutoff=cutoff)
        if near:
            return _did_you_mean([candidates[near[0]]])
    return "; see --help for all settings"


def _unknown_setting(name: str, source: str) -> ConfigError:
    return ConfigError(name, f"no such setting{_suggestion(name)}", source)


def _build(settings: dict[str, _Setting]) -> Config:
    nested: dict[str, Any] = {section: {} for section in _SECTIONS}
    for name, setting in settings.items():
        section, _, leaf = name.rpartition(".")
        (nested[section] if section else nested)[leaf] = setting.value
    parser = _parser("")
    try:
        namespace = parser.instantiate(parser.parse_object(nested))
        return Config(**{field.name: namespace[field.name] for field in dataclasses.fields(Config)})
    except ConfigError as error:
        raise _located(error, settings) from None


def _located(error: ConfigError, settings: dict[str, _Setting]) -> ConfigError:
    """`error` with the places of the settings that it names and somebody gave; a section is all its own."""
    of_section = [name for name in settings if name.startswith(f"{error.key}.")]
    named = [error.key, *of_section, *re.findall(r"\w+\.\w+", error.problem)]
    sources = dict.fromkeys(settings[name].source for name in named if name in settings)
    return ConfigError(error.key, error.problem, ", ".join(sources))


def _fill_placeholders(config: Config, source: str) -> str:
    """`run_dir` with the values of the settings that it names in braces."""
    values = to_dict(config)

    def fill(match: re.Match) -> str:
        name = match[1]
        if name is None:
            raise ConfigError("run_dir", f"a brace without its partner in {config.run_dir!r}", source)
        section, _, leaf = name.rpartition(".")
        if name == "run_dir":
            raise ConfigError("run_dir", "a folder cannot be named after itself, remove {run_dir}", source)
        if name not in _TYPES:
            raise ConfigError("run_dir", f"{{{name}}} is not a setting{_suggestion(name)}", source)
        value = values[section][leaf]
        return value if isinstance(value, str) else _describe(value)

    return re.sub(r"\{([^{}]*)\}|[{}]", fill, config.run_dir)


class _Dumper(yaml.SafeDumper):
    """Quotes text that this module would read as something else, such as "1e-3", which PyYAML leaves bare."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if _resolve_plain(text) == text else '"'
    ),
)


def _dump(config: Config) -> str:
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _HelpFormatter(DefaultHelpFormatter):
    """Leaves out jsonargparse's own `--model FILE` options, one for each section."""

    def add_argument(self, action) -> None:
        if action.dest not in _SECTIONS:
            super().add_argument(action)


def _parser(prog: str) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=prog,
        usage="%(prog)s --config FILE [--config FILE ...] [--section.key VALUE ...]",
        epilog="A VALUE given here wins over all files. Lists are written '[a, b]'; null means none.",
        formatter_class=_HelpFormatter,
        exit_on_error=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", default=SUPPRESS, help="YAML file; several merge, and later ones win."
    )
    parser.add_argument(
        "--print_config", action="store_true", default=SUPPRESS, help="Print all settings as YAML and stop."
    )
    parser.add_class_arguments(Config)
    return parser
