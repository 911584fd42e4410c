"""The one kind of error that a user can cause and repair."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """A mistake in what the user gave: settings, files, data.

    The message is complete on its own: it names the cause and the fix. Every command ends with this message
    on standard error and exit code 2, without a traceback.
    """


def run_command(main: Callable[[list[str]], int | None], argv: list[str], prog: str) -> int:
    """Runs the body of a command and returns its exit code.

    A UserError is printed and becomes code 2, an interrupt from the keyboard code 130, as in a shell.
    """
    try:
        return main(argv) or 0
    except UserError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{prog}: interrupted; the same command goes on from what is finished", file=sys.stderr)
        return 130
