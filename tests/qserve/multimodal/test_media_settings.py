"""Flags about images of requests, and the addresses that may be fetched from."""

import ipaddress
import json
import socket
import ssl
import subprocess
import threading
import time

import pytest

from formats.errors import InputError
from qserve.config import EngineConfig, ServerConfig
from qserve.engine.sizes import read_model
from qserve.multimodal.fetch import FetchError, fetch, is_public
from qserve.multimodal.settings import AllowedHost, MediaLimits
from tests.qserve.server.pictures import image_file, web_pages
from tests.tiny_vision import write_tiny_vision


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, 16), ("image=4", 4), ("image=0", 0), ('{"image": 2}', 2), ("video=1,image=3", 3)],
)
def test_most_images_of_a_prompt(text, expected):
    assert ServerConfig(limit_mm_per_prompt=text).media_limits.max_images == expected


def test_limits_of_videos():
    config = ServerConfig(limit_mm_per_prompt="video=7", max_video_bytes=5, video_decode_timeout=9)
    limits = config.media_limits
    assert (limits.max_videos, limits.max_images, limits.video_seconds) == (7, 16, 9)
    assert (limits.num_bytes("video"), limits.num_bytes("image")) == (5, 20 * 2**20)
    assert ServerConfig(limit_mm_per_prompt="image=7").media_limits.max_videos == 2


@pytest.mark.parametrize(
    "fields",
    [
        *({"limit_mm_per_prompt": text} for text in ("4", "image", "image=x", "picture=1", "{")),
        *({"limit_mm_per_prompt": json.dumps(v)} for v in ({"image": -1}, {"image": True})),
        *({"allowed_media_domains": [text]} for text in ("http://a.example", "a.example/x", "")),
        *({"allowed_media_domains": [text]} for text in ("a.example:0", "a:99999", "u@a.example")),
        {"allowed_local_media_path": "/no/such/folder"},
        {"max_media_bytes": 0},
    ],
)
def test_flags_that_are_refused(fields):
    (name,) = fields
    with pytest.raises(InputError, match=f"^--{name.replace('_', '-')}: "):
        ServerConfig(**fields)


@pytest.mark.parametrize(
    ("entry", "host", "port", "matches"),
    [
        ("a.example", "a.example", 443, True),
        ("A.Example", "a.example", 80, True),
        ("a.example", "a.example", 8080, False),
        ("a.example:8080", "a.example", 8080, True),
        ("a.example:8080", "a.example", 443, False),
        ("a.example", "b.a.example", 443, False),
        ("*.a.example", "b.a.example", 443, True),
        ("*.a.example", "a.example", 443, False),
        ("*.a.example", "xa.example", 443, False),
        ("*", "b.example", 443, True),
        ("*", "b.example", 22, False),
        ("[2001:db8::1]:81", "2001:db8::1", 81, True),
    ],
)
def test_hosts_that_match(entry, host, port, matches):
    assert AllowedHost.parse(entry).matches(host, port) is matches


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        *((each, False) for each in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1")),
        *((each, False) for each in ("169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1")),
        *((each, False) for each in ("255.255.255.255", "::", "::1", "fe80::1", "fc00::1")),
        *((each, False) for each in ("::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::")),
        *((each, False) for each in ("::7f00:1", "ff02::1", "fd00:ec2::254")),
    ],
)
def test_public_addresses(address, expected):
    assert is_public(ipaddress.ip_address(address)) is expected


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """A web server with a certificate of localhost, and the certificate's file."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = (str(folder / name) for name in ("cert.pem", "key.pem"))
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost", "-out", certificate, "-keyout", key),
        ],
        check=True,
        capture_output=True,
    )
    with web_pages() as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        yield server, certificate


def test_https_checks_the_certificate_of_the_name(secured, monkeypatch):
    server, certificate = secured
    port = server.server_port
    hosts = tuple(AllowedHost.parse(f"{each}:{port}") for each in ("localhost", "127.0.0.1"))
    limits = MediaLimits(hosts=(*hosts, AllowedHost.parse("[::1]")))

    def fetched(host) -> bytes:
        return fetch(f"https://{host}:{port}/a.png", limits, time.monotonic() + 20)

    with pytest.raises(FetchError, match="did not send it"):  # of an unknown authority
        fetched("127.0.0.1")
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    with pytest.raises(FetchError, match="did not send it"):  # of another name
        fetched("127.0.0.1")
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **fields: real(host.replace("localhost", "127.0.0.1"), *rest, **fields),
    )
    assert fetched("localhost") == image_file()


def test_a_proxy_of_the_environment_is_not_used(monkeypatch):
    """Its address would not be checked."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with web_pages() as server:
        hosts = (AllowedHost.parse(f"127.0.0.1:{server.server_port}"),)
        url = f"http://127.0.0.1:{server.server_port}/a.png"
        found = fetch(url, MediaLimits(hosts=hosts), time.monotonic() + 20)
    assert found == image_file()
    assert not [each for each in threading.enumerate() if isinstance(each, threading.Timer)]


@pytest.mark.parametrize(
    ("family", "kernels", "warns"),
    [
        ("gemma3", ["attention=triton"], True),
        ("gemma3", ["attention=-reference"], True),
        ("gemma3", ["attention=reference"], False),
        ("gemma3", ["attention=-triton"], False),
        ("gemma3", ["w8a8=triton"], False),
        ("qwen3_vl", ["attention=triton"], False),
    ],
)
def test_kernel_that_images_do_not_run_is_named(tmp_path, caplog, family, kernels, warns):
    """The rows of an image of Gemma 3 see each other; those of Qwen3-VL see earlier rows."""
    folder = write_tiny_vision(tmp_path / family, family)
    read_model(EngineConfig(model=str(folder), kernel=kernels))
    said = "does not apply to steps with images" in caplog.text
    assert said == warns, caplog.text
