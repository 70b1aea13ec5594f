"""`qserve chat`, `complete` and `run-batch`, against a scripted engine."""

import io
import json
import sys
from pathlib import Path

import pytest

from formats.errors import InputError
from qserve.cli import main
from qserve.config import EngineConfig
from qserve.run_batch import read_requests, run_batch
from qserve.tool_config import BatchConfig

TEXT = "Hello there, general reader."


@pytest.fixture
def url(live):
    return f"http://127.0.0.1:{live}/v1"


def talk(monkeypatch, url, command, *flags, lines=""):
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main([command, "--url", url, *flags])


def prompts(server) -> list[str]:
    return [server.tokenizer.decode(request[1], False) for request in server.client.requests]


def test_chat_remembers_what_was_said(server, url, monkeypatch, capsys):
    flags = ("--system-prompt", "Be kind.", "--temperature", "0.5", "--seed", "7")
    assert talk(monkeypatch, url, "chat", *flags, lines="one\n\ntwo\n") == 0
    assert capsys.readouterr().out == f"{TEXT}\n{TEXT}\n"
    first, second = prompts(server)
    say = server.tokenizer.render_chat
    messages = [("system", "Be kind."), ("user", "one"), ("assistant", TEXT), ("user", "two")]
    messages = [{"role": role, "content": text} for role, text in messages]
    assert first == say(messages[:2]) and second == say(messages)
    params = server.client.requests[0][2]
    assert (params.temperature, params.seed) == (0.5, 7)


def test_one_question_with_its_times(server, url, monkeypatch, capsys):
    assert talk(monkeypatch, url, "chat", "-q", "Hi", "--stats", "--max-tokens", "5") == 0
    captured = capsys.readouterr()
    assert captured.out.strip() and "first token" in captured.err
    assert server.client.requests[0][2].max_tokens == 5


def test_reasoning_is_for_terminals(make_server, run_live, monkeypatch, capsys):
    from qserve.config import ServerConfig

    server = make_server(ServerConfig(reasoning_parser="deepseek_r1"))
    server.client.text = "<think>It may be.</think>It is."
    url = f"http://127.0.0.1:{run_live(server)}/v1"
    assert talk(monkeypatch, url, "chat", "-q", "Hi") == 0
    assert capsys.readouterr().out == "It is.\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert talk(monkeypatch, url, "chat", "-q", "Hi") == 0
    shown = capsys.readouterr().out.replace("\033[0m", "").replace("\033[2m", "")
    assert shown == "It may be.\nIt is.\n"


def test_url_as_the_server_prints_it(url, monkeypatch, capsys):
    assert talk(monkeypatch, url.removesuffix("/v1"), "chat", "-q", "Hi") == 0
    assert capsys.readouterr().out.strip() == TEXT


def test_complete_continues_each_line(server, url, monkeypatch, capsys):
    assert talk(monkeypatch, url, "complete", lines="Once\nTwice\n") == 0
    assert capsys.readouterr().out.count("\n") == 2
    assert prompts(server) == ["Once", "Twice"]


def test_error_of_the_server_is_one_line_and_the_talk_goes_on(server, url, monkeypatch, capsys):
    server.client.fails_at = 2
    assert talk(monkeypatch, url, "chat", lines="one\n") == 1
    assert "error: The generation failed" in capsys.readouterr().err
    server.client.fails_at = None
    assert talk(monkeypatch, url, "chat", "--model-name", "other", "-q", "a") == 1
    assert "'other' does not exist" in capsys.readouterr().err


def test_what_had_no_answer_is_not_said_again(server, url, monkeypatch, capsys):
    long = "word " * 3000
    assert talk(monkeypatch, url, "chat", lines=f"{long}\ntwo\n") == 1
    assert prompts(server) == [server.tokenizer.render_chat([{"role": "user", "content": "two"}])]


def test_key_comes_from_the_environment(make_server, run_live, monkeypatch, capsys):
    from qserve.config import ServerConfig

    port = run_live(make_server(ServerConfig(api_key=["k"])))
    url = f"http://127.0.0.1:{port}/v1"
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert talk(monkeypatch, url, "chat", "-q", "a") == 1
    assert "Authorization" in capsys.readouterr().err
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert talk(monkeypatch, url, "chat", "-q", "a") == 0


def test_no_server_is_one_line(monkeypatch, capsys):
    assert talk(monkeypatch, "http://127.0.0.1:9/v1", "chat", "-q", "a") == 1
    assert "no server answers there" in capsys.readouterr().err
    assert talk(monkeypatch, "127.0.0.1:9", "chat", "-q", "a") == 1
    assert "--url: expected http" in capsys.readouterr().err


def line(name, body, url="/v1/completions", **fields) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body, **fields})


def test_batch_answers_each_line(docs_5m, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    lines = [line(f"r{n}", {"prompt": [n], "max_tokens": n + 1}) for n in range(40)]
    lines += ["", line("chat", chat, "/v1/chat/completions"), line("bad", {"prompt": []})]
    lines.append(line("response", {"input": "Hi", "max_output_tokens": 3}, "/v1/responses"))
    lines.append(line("vector", {"input": "a"}, "/v1/embeddings"))
    source.write_text("\n".join(lines))
    code = run_batch(
        EngineConfig(model=str(docs_5m), max_num_seqs=2),
        BatchConfig(input=str(source), output=str(target)),
        engine="fake_engine:FakeEngine",
    )
    assert code == 1 and "44 answers, 2 of them errors" in capsys.readouterr().out
    found = {entry["custom_id"]: entry for entry in map(json.loads, target.open())}
    assert len(found) == 44 and [*tmp_path.glob("*.partial")] == []
    for n in range(40):
        response = found[f"r{n}"]["response"]
        assert response["status_code"] == 200 and found[f"r{n}"]["error"] is None
        assert response["body"]["usage"]["completion_tokens"] == n + 1
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert found["response"]["response"]["body"]["usage"]["output_tokens"] == 3
    bad = found["bad"]
    assert bad["response"]["status_code"] == 400 and bad["error"]["code"] == "400"
    assert "prompt" in bad["error"]["message"]
    assert "embeddings" in found["vector"]["error"]["message"]  # of a language model


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1: expected a JSON object"),
        ("[]", "line 1: expected a JSON object"),
        (line("a", {}, "/v1/models"), "/v1/models"),
        (line("a", {}, method="GET"), "expected POST"),
        (line("a", {"stream": True}), "without stream"),
        (line("a", []), "an object"),
        (line("a", {}) + "\n" + line("a", {}), "line 2: expected a custom_id of its own"),
    ],
)
def test_file_that_is_no_batch_names_the_line(tmp_path, text, words):
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        list(read_requests(path))


def test_files_that_cannot_be_used(tmp_path, docs_5m):
    path = tmp_path / "in.jsonl"
    path.write_text("")
    engine = EngineConfig(model=str(docs_5m))
    with pytest.raises(InputError, match="is the input"):
        run_batch(engine, BatchConfig(input=str(path), output=str(path)))
    with pytest.raises(InputError, match="cannot be read"):
        run_batch(engine, BatchConfig(input=str(tmp_path / "no"), output=str(path)))
