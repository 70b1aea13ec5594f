"""The error class of this package."""

from formats.errors import InputError


class KernelError(InputError):
    """Tensors that an operation does not accept, or a kernel that cannot run on this device."""
