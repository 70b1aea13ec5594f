"""MediaSettings: the flags about images in requests, and MediaLimits, what they allow.

Loads no torch.
"""

import ipaddress
import json
import re
from dataclasses import dataclass
from pathlib import Path

from formats.errors import InputError
from qserve.command_line.setting import setting

ANY_HOST = "*"
WEB_PORTS = (80, 443)  # of an allowed host that is stated without a port
HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
FLAG = "--allowed-media-domains"
LIMIT_FLAG = "--limit-mm-per-prompt"
MAX_IMAGES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedHost:
    """One entry of --allowed-media-domains."""

    host: str  # in lower case; "*": any; "*.example.com": its subdomains
    port: int | None = None  # None: the ports of http and https

    @classmethod
    def parse(cls, text: str) -> "AllowedHost":
        """Parse HOST or HOST:PORT, with an IPv6 address in brackets. Raises InputError."""
        found = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]/@]+)(?::(\d{1,5}))?", text.lower())
        host, port = (found[1].strip("[]"), found[2]) if found else ("", None)
        is_named = host == ANY_HOST or HOST.fullmatch(host) is not None
        if not (is_named or is_address(host)) or int(port or 1) not in range(1, 2**16):
            raise InputError(FLAG, f"expected HOST or HOST:PORT, found {text!r:.200}")
        return cls(host=host, port=None if port is None else int(port))

    def matches(self, host: str, port: int) -> bool:
        if port != self.port and (self.port is not None or port not in WEB_PORTS):
            return False
        if self.host.startswith("*."):
            return host.endswith(self.host[1:])
        return self.host in (ANY_HOST, host)


def is_address(host: str) -> bool:
    """Return True for an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Sources and sizes of the images that requests may have."""

    hosts: tuple[AllowedHost, ...] = ()  # (): nothing is fetched
    local_path: str | None = None  # None: no file URLs
    max_images: int = MAX_IMAGES  # of one prompt
    max_bytes: int = 20 * 2**20  # of one image's file
    max_pixels: int = 2**26  # of one image
    fetch_seconds: float = 10.0  # for all images of one prompt


@dataclass(frozen=True, kw_only=True)  # no slots: a class may have one such base only
class MediaSettings:
    """Settings of images in requests."""

    allowed_media_domains: list[str] = setting(
        [],
        "hosts from which images of requests may be fetched: HOST, HOST:PORT, *.example.com, or *"
        " for all; addresses that are not public must be listed themselves; default: none, so that"
        " images come as data: URLs",
        many=True,
    )
    allowed_local_media_path: str | None = setting(
        None, "folder whose files requests may name as file: URLs; default: none"
    )
    limit_mm_per_prompt: str | None = setting(
        None, f'most images of one prompt, as image=N or {{"image": N}}; default: {MAX_IMAGES}'
    )
    max_media_bytes: int = setting(20 * 2**20, "largest file of one image in bytes", low=1)
    max_image_pixels: int = setting(
        2**26, "most pixels of one image, checked before it is decoded", low=1, high=2**28
    )
    media_fetch_timeout: float = setting(
        10.0, "seconds that fetching all images of one request may take", low=0.001
    )
    num_media_workers: int = setting(
        1, "processes that fetch and decode the images of requests", low=1, high=64
    )

    @property
    def media_limits(self) -> MediaLimits:
        """Parsed settings of images. Raises InputError."""
        folder = self.allowed_local_media_path
        if folder is not None and not Path(folder).is_dir():
            raise InputError("--allowed-local-media-path", f"{folder} is not a folder")
        return MediaLimits(
            hosts=tuple(map(AllowedHost.parse, self.allowed_media_domains)),
            local_path=folder,
            max_images=_num_images(self.limit_mm_per_prompt),
            max_bytes=self.max_media_bytes,
            max_pixels=self.max_image_pixels,
            fetch_seconds=self.media_fetch_timeout,
        )


def _num_images(text: str | None) -> int:
    """Parse image=N or {"image": N}. Other kinds of media may have a limit, too."""
    from qserve.multimodal.media import KINDS  # loads numpy

    if text is None:
        return MAX_IMAGES
    found: object
    try:
        if text.lstrip().startswith("{"):
            found = json.loads(text)
        else:
            pairs = [each.partition("=")[::2] for each in text.split(",")]
            found = {name.strip(): int(count) for name, count in pairs}
    except (ValueError, RecursionError):
        found = None
    if (
        not isinstance(found, dict)
        or set(found) - set(KINDS)
        or any(type(count) is not int or count < 0 for count in found.values())
    ):
        raise InputError(
            LIMIT_FLAG, f'expected image=N or {{"image": N}}, found {text!r:.200}', "write image=4"
        )
    return found.get("image", MAX_IMAGES)
