"""The pages in a headless Chromium; skipped without one. QSERVE_SCREENSHOTS keeps pictures."""

import os
from pathlib import Path

import pytest

from qserve.config import ServerConfig
from tests.qserve.server.chromium import Chromium, find

pytestmark = pytest.mark.skipif(find() is None, reason="needs Chromium")
LOADED = "document.readyState == 'complete' && document.getElementById('model').options.length"
TEXT = "A trait is a set of methods.\n\nSee `impl Trait for Type`: it says how. "


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    made = Chromium(tmp_path_factory.mktemp("chromium"))
    yield made
    made.close()


def keep(chromium, name):
    if folder := os.environ.get("QSERVE_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        chromium.screenshot(Path(folder) / f"{name}.png")


def say(chromium, text):
    chromium.run("document.getElementById('text').focus()")
    chromium.type(text)
    chromium.press_enter()


def is_in_view(chromium, element):
    """Return True if all of the element is visible, and nothing covers it."""
    return chromium.run(
        f"(() => {{ const e = {element}, box = e.getBoundingClientRect();"
        " const over = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);"
        " return box.width > 0 && box.top >= 0 && box.bottom <= innerHeight && box.left >= 0"
        " && box.right <= innerWidth && e.contains(over); })()"
    )


def test_chat_is_typed_streamed_and_counted(server, live, chromium):
    server.client.text = TEXT * 3
    chromium.problems.clear()
    chromium.set_size(1000, 600)
    chromium.open(f"http://127.0.0.1:{live}/")
    chromium.wait(LOADED)
    assert chromium.run("document.activeElement.id") == "text"
    chromium.run("document.querySelector('details').open = true")
    for number in (1, 2):
        say(chromium, "What is a trait?")
        chromium.wait(f"document.querySelectorAll('.facts').length == {number}")
    keep(chromium, "chat")
    shown = chromium.run("[...document.querySelectorAll('.turn')].map((e) => e.firstChild.data)")
    assert shown == ["What is a trait?", server.client.text] * 2
    # What came last is seen, though the page is longer than the window.
    assert is_in_view(chromium, "[...document.querySelectorAll('.facts')].at(-1)")
    assert is_in_view(chromium, "document.getElementById('send')")
    assert chromium.problems == []


def test_reasoning_is_shown_before_the_answer(make_server, run_live, chromium):
    config = ServerConfig(reasoning_parser="deepseek_r1", served_model_name=["tiny"])
    server = make_server(config)
    server.client.text = f"<think>{TEXT}</think>It is a set of methods."
    chromium.problems.clear()
    chromium.set_size(1000, 600)
    chromium.open(f"http://127.0.0.1:{run_live(server)}/")
    chromium.wait(LOADED)
    say(chromium, "What is a trait?")
    chromium.wait("document.querySelectorAll('.facts').length == 1")
    keep(chromium, "reasoning")
    thought, rest = chromium.run(
        "[document.querySelector('.reasoning').innerText,"
        " document.querySelector('.turn.assistant').innerText]"
    )
    assert TEXT.split()[-1] in thought and "a set of methods." in rest.removeprefix(thought)
    assert is_in_view(chromium, "document.querySelector('.reasoning')")
    assert chromium.problems == []


def test_error_on_a_narrow_dark_screen(server, live, chromium):
    chromium.set_size(360, 640)
    chromium.set_dark()
    chromium.open(f"http://127.0.0.1:{live}/")
    chromium.wait(LOADED)
    chromium.run("document.getElementById('temperature').value = 9")
    say(chromium, "Hello")
    chromium.wait("document.querySelectorAll('.error').length == 1")
    keep(chromium, "narrow")
    assert "temperature" in chromium.run("document.querySelector('.error').textContent")
    assert not chromium.run("document.documentElement.scrollWidth > innerWidth")
    for name in ("text", "send", "stop", "status"):
        assert is_in_view(chromium, f"document.getElementById('{name}')"), name


def test_list_of_routes(live, chromium):
    chromium.problems.clear()
    chromium.set_size(1000, 700)
    chromium.open(f"http://127.0.0.1:{live}/docs")
    chromium.wait("document.querySelectorAll('#routes details').length > 10")
    chromium.run("document.querySelectorAll('#routes details')[1].open = true")
    keep(chromium, "routes")
    assert chromium.problems == []
