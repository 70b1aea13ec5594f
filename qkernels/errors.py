"""The error class of this package."""

from formats.errors import InputError


class KernelError(InputError):
    """Error for arguments that an operation does not accept, or a kernel that cannot run them.

    It names the argument, what was expected and found, and the remedy.
    """
