"""Errors of requests."""

from formats.errors import InputError


class ParameterError(InputError):
    """A request parameter is out of range. `subject` is the parameter's name."""


class BusyError(InputError):
    """The engine has no memory or time for the request now; a later attempt may succeed."""
