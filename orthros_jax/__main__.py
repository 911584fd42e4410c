"""Commands: python -m orthros_jax COMMAND [arguments]."""

import difflib
import importlib
import sys

from orthros_jax.errors import UserError, run_command

# Imported on use, so that a command starts without the libraries of the others.
COMMANDS = {
    "prepare": ("orthros_jax.data.prepare:main", "turn text, JSONL or parquet into token shards"),
    "import": ("orthros_jax.convert.import_command:main", "turn a Hugging Face model into a run"),
    "export": ("orthros_jax.convert.export_command:main", "turn a run into a Hugging Face model"),
    "generate": ("orthros_jax.inference.generate_command:main", "continue prompts with a trained model"),
    "compile": ("orthros_jax.compilation.command:main", "compile a run for a pod, and report whether it fits"),
    "plot": ("orthros_jax.training.plot:main", "draw the loss of runs against tokens and FLOPs"),
}
USAGE = "\n".join(
    [
        "usage: python -m orthros_jax COMMAND [arguments]",
        "",
        *(f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items()),
        "",
        "COMMAND --help describes one of them; training is python train.py.",
    ]
)


def main(argv: list[str]) -> int:
    """Runs the command that `argv` names and returns its exit code."""
    if not argv:
        print(USAGE, file=sys.stderr)
        return 2
    name, *arguments = argv
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    prog = "python -m orthros_jax"
    if name not in COMMANDS:
        return run_command(_unknown_command, [name], prog)
    module, _, function = COMMANDS[name][0].partition(":")
    return run_command(getattr(importlib.import_module(module), function), arguments, f"{prog} {name}")


def _unknown_command(argv: list[str]) -> int:
    (name,) = argv
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
    raise UserError(f"no command {name!r}; {hint}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
