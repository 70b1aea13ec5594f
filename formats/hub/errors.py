"""Errors of the hub client as InputError: the cause and the remedy in one line."""

import errno
import os
from collections.abc import Iterator

from formats.errors import DiskError, InputError, one_line
from formats.hub.name import HubName

TOKEN = "set HF_TOKEN to a token of an account that may read it"
AGAIN = "run the same command again: finished files are kept"
OTHER_FOLDER = "choose another folder: --download-dir or HF_HOME"
# Names of base classes of connection errors. They are names because huggingface_hub has changed its
# HTTP library several times.
UNREACHABLE = {"TransportError", "ConnectionError", "Timeout", "TimeoutError"}
# HTTP status -> (problem, remedy)
STATUSES = {
    401: ("the hub rejects the token (401)", TOKEN),
    403: ("the hub denies access (403)", TOKEN),
    416: ("a partial download does not fit the file on the hub", AGAIN),
    429: ("the hub's rate limit is reached (429)", f"wait a few minutes, or {TOKEN}"),
    451: ("is not available for legal reasons (451)", "choose another model"),
}


def endpoint() -> str:
    """Return the hub's address: HF_ENDPOINT, or the public one."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def is_offline(error: BaseException) -> bool:
    """Return True if HF_HUB_OFFLINE forbids requests."""
    return any(type(each).__name__ == "OfflineModeIsEnabled" for each in _chain(error))


def is_unreachable(error: BaseException) -> bool:
    """Return True if the hub did not answer, or answered only with a server error."""
    if is_offline(error) or (_status(error) or 0) >= 500:
        return True
    return any(UNREACHABLE & {cls.__name__ for cls in type(e).__mro__} for e in _chain(error))


def explained(
    error: BaseException, name: HubName, noun: str, cache: str, *, is_begun: bool = False
) -> InputError:
    """Turn any exception of the hub client into an InputError.

    `is_begun`: the hub has answered, and the download has begun.
    """
    from huggingface_hub import errors as hub

    subject, page = str(name), f"{endpoint()}/{name.repo}"
    disk = next((e.errno for e in _chain(error) if isinstance(e, OSError) and e.errno), None)
    if disk in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(subject, f"no space left in {cache}", f"free some, or {OTHER_FOLDER}")
    if disk in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DiskError(
            subject, f"cannot be written to {cache}: {os.strerror(disk)}", OTHER_FOLDER
        )
    found: tuple[str, str] | None = None
    for each in _chain(error):
        if isinstance(each, hub.GatedRepoError):
            found = f"is gated: its owner must grant access ({page})", f"ask there, then {TOKEN}"
        elif isinstance(each, hub.RevisionNotFoundError):
            found = f"has no revision {name.revision or 'main'}", f"see {page} for its branches"
        elif isinstance(each, hub.RepositoryNotFoundError):
            found = (
                f"there is no such folder, and no such {noun} on {endpoint()}",
                f"check the spelling; for a private {noun} {TOKEN}",
            )
        elif isinstance(each, hub.DisabledRepoError):
            found = "is disabled on the hub", f"choose another {noun}"
        elif (status := _status(each)) in STATUSES:
            found = STATUSES[status]
        if found is not None:
            return InputError(subject, *found)
    if is_offline(error):
        return InputError(
            subject,
            f"is not in the cache {cache}, and HF_HUB_OFFLINE forbids downloading it",
            "unset HF_HUB_OFFLINE, or name a local folder",
        )
    if is_begun and is_unreachable(error):
        return InputError(subject, f"the download broke off: {one_line(_root(error))}", AGAIN)
    if is_unreachable(error):
        return InputError(
            subject,
            f"is not in the cache {cache}, and {endpoint()} cannot be reached:"
            f" {one_line(_root(error))}",
            "check the network, HF_ENDPOINT and proxies, or name a local folder",
        )
    return InputError(subject, f"cannot be downloaded: {one_line(error)}", AGAIN)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _root(error: BaseException) -> BaseException:
    return [*_chain(error)][-1]


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of the first response among the causes."""
    for each in _chain(error):
        status = getattr(getattr(each, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None
