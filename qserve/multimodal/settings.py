"""MediaSettings: the flags about images and videos in requests; MediaLimits: their parsed values.

Loads no torch and no numpy.
"""

import ipaddress
import json
import re
from dataclasses import dataclass
from pathlib import Path

from formats.errors import InputError
from qserve.command_line.setting import setting

KINDS = ("image", "video", "audio")
ANY_HOST = "*"
WEB_PORTS = (80, 443)  # ports of an allowed host that states none
HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
FLAG = "--allowed-media-domains"
LIMIT_FLAG = "--limit-mm-per-prompt"
MAX_IMAGES, MAX_VIDEOS = 16, 2
LIMIT_FORM = 'image=N, video=N, or {"image": N, "video": N}'


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedHost:
    """One entry of --allowed-media-domains."""

    host: str  # name or address in lower case; "*": any host; "*.example.com": its subdomains
    port: int | None = None  # None: 80 and 443, the ports of http and https

    @classmethod
    def parse(cls, text: str) -> "AllowedHost":
        """Parse HOST or HOST:PORT, with an IPv6 address in brackets. Raises InputError."""
        found = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]/@]+)(?::(\d{1,5}))?", text.lower())
        host, port = (found[1].strip("[]"), found[2]) if found else ("", None)
        is_named = host == ANY_HOST or HOST.fullmatch(host) is not None
        if not (is_named or is_address(host)) or int(port or 1) not in range(1, 2**16):
            raise InputError(
                FLAG,
                f"expected HOST or HOST:PORT, found {text!r:.200}",
                "leave out the scheme and the path",
            )
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
    """The allowed sources and sizes of the images and videos in requests."""

    hosts: tuple[AllowedHost, ...] = ()  # hosts to fetch from; (): nothing is fetched
    local_path: str | None = None  # folder of file: URLs; None: they are not allowed
    max_images: int = MAX_IMAGES  # images of one prompt
    max_bytes: int = 20 * 2**20  # bytes of one image's file
    max_pixels: int = 2**26  # pixels of one image
    fetch_seconds: float = 10.0  # time for fetching all images and videos of one prompt
    max_videos: int = MAX_VIDEOS  # videos of one prompt
    max_video_bytes: int = 64 * 2**20  # bytes of one video's file
    max_video_frames: int = 768  # frames that are chosen from one video
    max_video_pixels: int = 3 * 2**23  # pixels of all chosen frames of one video, after scaling
    video_seconds: float = 30.0  # time for decoding one video

    def num_bytes(self, kind: str) -> int:
        """Return the largest number of bytes of a file of this kind of media."""
        return self.max_video_bytes if kind == "video" else self.max_bytes


@dataclass(frozen=True, kw_only=True)  # no slots: a class may have one such base only
class MediaSettings:
    """Settings for the images and videos in requests."""

    allowed_media_domains: list[str] = setting(
        [],
        "hosts from which requests may fetch images and videos: HOST, HOST:PORT, *.example.com, or"
        " * for all public ones; a private IP address must be listed itself; default: none (only"
        " data: URLs)",
        many=True,
    )
    allowed_local_media_path: str | None = setting(
        None, "folder whose files requests may read through file: URLs; default: none"
    )
    limit_mm_per_prompt: str | None = setting(
        None,
        f"maximum number of images and videos in one prompt, as {LIMIT_FORM}; default:"
        f" {MAX_IMAGES} images and {MAX_VIDEOS} videos",
    )
    max_media_bytes: int = setting(20 * 2**20, "largest image file in bytes", low=1)
    max_image_pixels: int = setting(
        2**26, "maximum pixels of one image, checked before it is decoded", low=1, high=2**28
    )
    media_fetch_timeout: float = setting(
        10.0, "seconds that fetching all images and videos of one request may take", low=0.001
    )
    max_video_bytes: int = setting(64 * 2**20, "largest video file in bytes", low=1)
    max_video_frames: int = setting(
        768, "maximum number of frames sampled from one video", low=1, high=2**14
    )
    max_video_pixels: int = setting(
        3 * 2**23,
        "maximum pixels of all sampled frames of one video; larger frames are scaled down",
        low=1,
        high=3 * 2**23,
    )
    video_decode_timeout: float = setting(
        30.0, "seconds that decoding one video may take", low=0.001, high=60.0
    )
    num_media_workers: int = setting(
        1, "processes that fetch and decode the images and videos of requests", low=1, high=64
    )

    @property
    def media_limits(self) -> MediaLimits:
        """The parsed settings. Raises InputError."""
        folder = self.allowed_local_media_path
        if folder is not None and not Path(folder).is_dir():
            raise InputError(
                "--allowed-local-media-path",
                f"{folder} is not a folder",
                "create it, or name another folder",
            )
        counts = _counts(self.limit_mm_per_prompt)
        return MediaLimits(
            hosts=tuple(map(AllowedHost.parse, self.allowed_media_domains)),
            local_path=folder,
            max_images=counts.get("image", MAX_IMAGES),
            max_bytes=self.max_media_bytes,
            max_pixels=self.max_image_pixels,
            fetch_seconds=self.media_fetch_timeout,
            max_videos=counts.get("video", MAX_VIDEOS),
            max_video_bytes=self.max_video_bytes,
            max_video_frames=self.max_video_frames,
            max_video_pixels=self.max_video_pixels,
            video_seconds=self.video_decode_timeout,
        )


def _counts(text: str | None) -> dict[str, int]:
    """Parse the maximum number of media of each kind. Raises InputError."""
    if text is None:
        return {}
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
            LIMIT_FLAG, f"expected {LIMIT_FORM}, found {text!r:.200}", "write image=4,video=1"
        )
    return found
