"""The errors that a user can cause and mend. Knows nothing of what raised them.

Every message names the object, says what was expected and what was found, and gives the remedy.
"""


class InputError(ValueError):
    """Something the user gave cannot be used. The command line prints one line and exits with 1."""

    def __init__(self, subject: str, problem: str, remedy: str = "") -> None:
        self.subject = subject
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{subject}: {problem}" + (f" ({remedy})" if remedy else ""))


class SchemeError(InputError):
    """A quantization scheme is unknown, or does not fit a tensor's shape."""


class CheckpointError(InputError):
    """A checkpoint's files, names, shapes or bytes are not what they must be."""


class RangeError(CheckpointError):
    """Weights are too large or too small for the scales that a checkpoint stores."""


class DiskError(CheckpointError):
    """The disk refuses to hold something. Space can be made, so what is finished stays."""


def one_line(error: BaseException) -> str:
    """The message of somebody else's error, fit for one line of ours; its type if it says nothing.

    Some are pages long, or quote the input. Of the system's errors it is the reason alone: ours
    name the file.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError):
        return f"there is no {error}"
    return " ".join(str(error).split())[:300] or type(error).__name__
