"""Errors of requests."""

from formats.errors import InputError

LEAVE_OUT = "leave it out to use the default"  # remedy for a flag or a field of a request


class ParameterError(InputError):
    """A request parameter is out of range. `subject` is the parameter's name."""


class BusyError(InputError):
    """The engine has no memory or time for the request now; a later attempt may succeed."""


def relayed_error(subject: str, message: str) -> InputError:
    """Return the error for a message that already ends with its remedy, such as an engine's."""
    return InputError(subject, message, remedy="")
