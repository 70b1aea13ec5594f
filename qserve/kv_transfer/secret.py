"""`read_secret`: reads the secret that engines share from a file."""

from pathlib import Path

from formats.errors import InputError, one_line
from qserve.kv_transfer.config import FLAG

MAX_SECRET_BYTES = 64  # longest key that SHA-256 uses unhashed


def read_secret(path: object) -> bytes:
    """Return the file's content without outer white space; b"" if `path` is None.

    Raises InputError.
    """
    if path is None:
        return b""
    try:
        secret = Path(path).read_bytes().strip()
    except (OSError, TypeError) as error:
        raise InputError(
            f"{FLAG} secret_file",
            f"cannot be read: {one_line(error)}",
            "name a file of 16 to 64 bytes that all engines may read",
        ) from error
    if not 16 <= len(secret) <= MAX_SECRET_BYTES:
        raise InputError(
            f"{FLAG} secret_file",
            f"expected 16 to {MAX_SECRET_BYTES} bytes, found {len(secret)}",
            "write one with: openssl rand -hex 32",
        )
    return secret
