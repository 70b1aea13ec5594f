"""The chat page's script, run by Node against a scripted server; skipped without Node."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from qserve.config import ServerConfig
from qserve.server.page.routes import FOLDER

TEXT = "Hello there, general reader."
HARNESS = Path(__file__).with_name("page_in_node.js")

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")


def run(port: int, *texts: str) -> dict:
    command = ["node", HARNESS, FOLDER / "index.html", f"http://127.0.0.1:{port}/", *texts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_conversation_with_parameters(server, live):
    server.client.text = "日本 \U0001f600 done"
    shown = run(live, "--temperature=0.5", "--max_tokens=100", "--system=Be kind.", "one", "two")
    assert shown["models"] == ["tiny"] and "256" in shown["status"]
    assert [turn["kind"] for turn in shown["turns"]] == ["turn user", "turn assistant"] * 2
    assert [turn["text"] for turn in shown["turns"]] == ["one", server.client.text, "two"] + [
        server.client.text
    ]
    (facts,) = shown["turns"][1]["facts"]
    assert "first after" in facts and facts.endswith("end: stop")
    prompt = server.tokenizer.decode(server.client.requests[1][1], False)
    said = [("system", "Be kind."), ("user", "one"), ("assistant", server.client.text)]
    messages = [{"role": r, "content": c} for r, c in (*said, ("user", "two"))]
    assert prompt == server.tokenizer.render_chat(messages)
    params = server.client.requests[1][2]
    assert (params.temperature, params.max_tokens) == (0.5, 100)


def test_reasoning_is_shown_and_not_resent(make_server, run_live):
    config = ServerConfig(reasoning_parser="deepseek_r1", served_model_name=["tiny"])
    server = make_server(config)
    server.client.text = "<think>It may be so.</think>It is so."
    shown = run(run_live(server), "one", "two")
    for turn in shown["turns"][1::2]:
        assert turn["reasoning"] == ["It may be so."] and turn["text"] == "It is so."
        assert "first after" in turn["facts"][0]
    said = [("user", "one"), ("assistant", "It is so."), ("user", "two")]
    prompt = server.tokenizer.decode(server.client.requests[1][1], False)
    assert prompt == server.tokenizer.render_chat([{"role": r, "content": c} for r, c in said])


def test_errors_are_shown_and_not_resent(server, live):
    server.client.fails_at = 2
    shown = run(live, "--max_tokens=9", "one")
    kinds = [turn["kind"] for turn in shown["turns"]]
    assert kinds == ["turn user", "turn assistant", "turn error"]
    assert "The generation failed" in shown["turns"][2]["text"]
    server.client.fails_at = None
    shown = run(live, "--temperature=9", "one")
    assert "temperature" in shown["turns"][1]["text"] and shown["messages"] == []


def test_page_prompts_for_key(make_server, run_live):
    port = run_live(make_server(ServerConfig(api_key=["k"], served_model_name=["tiny"])))
    assert "Authorization" in run(port)["status"]
    shown = run(port, "--key=k", "one")
    assert shown["turns"][1]["text"] == TEXT
