"""The error of this package. Knows nothing of what raised it."""

from formats.errors import InputError


class KernelError(InputError):
    """An operation was given tensors that it cannot take, or a kernel that cannot run here."""
