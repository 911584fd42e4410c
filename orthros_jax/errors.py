"""The one kind of error that a user can cause and repair."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """A mistake in what the user gave: settings, files, data.

    The message is complete on its own: it names the cause and the fix. Every command ends with this message
    on standard error and exit code 2, without a traceback.
    """


def run_command(main: Callable[[list[str]], int | None], argv: list[str], prog: str) -> int:
    """Runs the body of a command and returns its exit code; a UserError is printed and becomes code 2."""
    try:
        return main(argv) or 0
    except UserError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
