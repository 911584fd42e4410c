"""The one kind of error that a user can cause and repair."""


class UserError(Exception):
    """A mistake in what the user gave: settings, files, data.

    The message is complete on its own: it names the cause and the fix. Every command ends with this message on
    standard error and exit code 2, without a traceback.
    """
