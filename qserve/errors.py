"""Errors of requests."""

from formats.errors import InputError


class ParameterError(InputError):
    """A parameter is out of range. `subject` is the parameter's name."""


class BusyError(InputError):
    """There is no memory or time for the request now; another attempt may succeed."""
