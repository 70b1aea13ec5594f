"""ParameterError: a parameter of a request is out of range."""

from formats.errors import InputError


class ParameterError(InputError):
    """`subject` is the parameter's name."""
