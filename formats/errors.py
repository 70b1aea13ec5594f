"""Errors that a user can cause and fix.

Every message names the object, says what was expected and what was found, and gives the remedy.
"""

from typing import Any

# remedies that several modules give
CHECK_ACCESS = "check that you may read it, and that the disk works"
DOWNLOAD_AGAIN = "download it again"
COPY_BLOCK = "copy quantization_config from the original checkpoint"
QUANTIZE_FLOAT = "quantize the float model with `qserve quantize`"
FREE_SPACE = "free space on the disk, and check its permissions"
COPY_CONFIG = "copy config.json from the original model"
DOWNLOAD_BOTH = "download the weights and config.json again, from the same checkpoint"
QUANTIZE_AGAIN = "download the checkpoint again, or quantize the model again"
ONE_SCHEME = "quantize them with one scheme"


class InputError(ValueError):
    """Invalid input from the user. The command line prints one line and exits with 1."""

    def __init__(self, subject: str, problem: str, remedy: str = "") -> None:
        self.subject = subject
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{subject}: {problem}" + (f" ({remedy})" if remedy else ""))


class SchemeError(InputError):
    """A quantization scheme is unknown, or does not fit a tensor's shape."""


class CheckpointError(InputError):
    """A checkpoint's files, names, shapes or bytes are not what they must be."""


def config_error(
    key: str, expected: str, found: Any, remedy: str = "copy it from the float model"
) -> CheckpointError:
    """Return the error for a value of config.json that no model can have."""
    return CheckpointError(
        f"config.json {key}", f"expected {expected}, found {found!r:.80}", remedy
    )


def block_error(key: str, problem: str) -> CheckpointError:
    """Return the error for a value of quantization_config that its tool never writes."""
    return CheckpointError(key, problem, COPY_BLOCK)


def unsupported_error(subject: str, problem: str) -> CheckpointError:
    """Return the error for a quantized checkpoint of a kind that this project does not read."""
    return CheckpointError(subject, problem, QUANTIZE_FLOAT)


def tensor_error(name: str, problem: str) -> CheckpointError:
    """Return the error for a stored tensor that contradicts config.json or its format."""
    return CheckpointError(name, problem, DOWNLOAD_BOTH)


def weight_error(name: str, problem: str) -> CheckpointError:
    """Return the error for a weight's tensors, read from a file or made by a user's own code."""
    return CheckpointError(
        name, problem, "download the checkpoint again; your own tensors need this type and shape"
    )


class RangeError(CheckpointError):
    """Weights are too large or too small for the scales that a checkpoint stores."""


class DiskError(CheckpointError):
    """A write to disk failed. The user can free space, so finished files are kept."""


def one_line(error: BaseException) -> str:
    """Return another library's error message as one line, or its type if it has none.

    Messages may be pages long or quote the input. For an OSError only the reason is kept, because
    our errors name the file.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError):
        return f"there is no {error}"
    return " ".join(str(error).split())[:300] or type(error).__name__
