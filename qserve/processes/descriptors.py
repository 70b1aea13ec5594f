"""Limit of file descriptors of this process and of the processes that it starts."""

import contextlib
import resource


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of file descriptors to the hard limit. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
