"""The listening socket: TCP or a Unix socket; and the check of TLS files."""

import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

from formats.errors import InputError, one_line
from formats.files.folder_lock import is_still_named, lock
from qserve.config import ServerConfig


def bind(config: ServerConfig) -> socket.socket:
    """Return a socket that is bound and does not listen yet. Raises InputError.

    No other program can bind the address from now on, although nothing listens there while the
    model loads. Call `allow_restart` before the socket listens. The path of a Unix socket must be
    owned (`owned_path`).
    """
    if config.uds is not None:
        return _bind_path(config.uds)
    try:
        family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[
            0
        ]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # SO_REUSEADDR would let several loading servers bind one port: all but the first to
            # listen would fail then, after they have loaded their models.
            listener.bind(address)
        except OSError:
            # Old connections of a server that has ended also block a port, but not with the option.
            allow_restart(listener)
            listener.bind(address)
    except (OSError, OverflowError) as error:
        raise address_error(f"{config.host}:{config.port}", error) from error
    return listener


def allow_restart(listener: socket.socket) -> None:
    """Let a later server listen on the address while connections of this one time out."""
    if listener.family != socket.AF_UNIX:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def address(listener: socket.socket, *, tls: bool) -> str:
    """Return the URL of a listening socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def address_error(address: str, error: Exception) -> InputError:
    return InputError(
        address,
        f"cannot listen on this address: {one_line(error)}",
        "choose another --host, --port or --uds",
    )


@contextlib.contextmanager
def owned_path(path: str | None) -> Iterator[None]:
    """Own the path of a Unix socket, from before the bind until the file is removed.

    While a server loads its model, it does not listen yet, and its socket looks like that of a
    killed server. PATH.lock is therefore locked: the system unlocks it when the process ends,
    however that happens. None: the server listens on TCP. Raises InputError if another server owns
    the path.
    """
    if path is None:
        yield
        return
    lock_path = Path(f"{path}.lock")
    descriptor = _locked(path, lock_path)
    try:
        yield
    finally:
        remove(str(lock_path))
        os.close(descriptor)


def remove(path: str | None) -> None:
    """Remove the file of the server's Unix socket. None: the server listened on TCP.

    The argument is a path because a closed socket no longer knows its path.
    """
    if path is not None:
        with contextlib.suppress(OSError):
            os.unlink(path)


def check_tls(config: ServerConfig) -> None:
    """Raise InputError if the TLS certificates cannot be used."""
    if config.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(config, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise InputError(flag, "requires --ssl-certfile", "add the certificate")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (OSError, ValueError) as error:
        raise InputError(
            "--ssl-certfile",
            f"cannot load the certificate and its key: {one_line(error)}",
            "use PEM files of a certificate and of its unencrypted key",
        ) from error


def _locked(path: str, lock_path: Path) -> int:
    """Return a descriptor that holds the lock of a Unix socket's path. Raises InputError."""
    while True:
        try:
            descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise address_error(path, error) from error
        try:
            lock(descriptor)
        except BlockingIOError as error:
            os.close(descriptor)
            in_use = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            raise address_error(path, in_use) from error
        if is_still_named(descriptor, lock_path):
            return descriptor
        os.close(descriptor)  # the last owner has just removed the file: create another


def _bind_path(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode) and not _is_answered(path):
            os.unlink(path)  # a server that was killed has left it
    except FileNotFoundError:
        pass
    except OSError as error:
        raise address_error(path, error) from error
    try:
        listener.bind(path)
    except OSError as error:
        raise address_error(path, error) from error
    return listener


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(path) == 0
