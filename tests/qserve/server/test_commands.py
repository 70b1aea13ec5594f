"""`qserve chat` and `complete`, against a scripted engine."""

import io
import sys

import pytest

from qserve.cli import main

TEXT = "Hello there, general reader."


@pytest.fixture
def url(live):
    return f"http://127.0.0.1:{live}/v1"


def talk(monkeypatch, url, command, *flags, lines=""):
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main([command, "--url", url, *flags])


def prompts(server) -> list[str]:
    return [server.tokenizer.decode(request[1], False) for request in server.client.requests]


def test_chat_command_keeps_history(server, url, monkeypatch, capsys):
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


def test_chat_command_shows_times(server, url, monkeypatch, capsys):
    assert talk(monkeypatch, url, "chat", "-q", "Hi", "--stats", "--max-tokens", "5") == 0
    captured = capsys.readouterr()
    assert captured.out.strip() and "first token" in captured.err
    assert server.client.requests[0][2].max_tokens == 5


def test_reasoning_is_shown_only_on_terminals(make_server, run_live, monkeypatch, capsys):
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


def test_printed_url_is_accepted(url, monkeypatch, capsys):
    assert talk(monkeypatch, url.removesuffix("/v1"), "chat", "-q", "Hi") == 0
    assert capsys.readouterr().out.strip() == TEXT


def test_complete_continues_each_line(server, url, monkeypatch, capsys):
    assert talk(monkeypatch, url, "complete", lines="Once\nTwice\n") == 0
    assert capsys.readouterr().out.count("\n") == 2
    assert prompts(server) == ["Once", "Twice"]


def test_server_error_is_one_line_and_chat_continues(server, url, monkeypatch, capsys):
    server.client.fails_at = 2
    assert talk(monkeypatch, url, "chat", lines="one\n") == 1
    assert "error: The generation failed" in capsys.readouterr().err
    server.client.fails_at = None
    assert talk(monkeypatch, url, "chat", "--model-name", "other", "-q", "a") == 1
    assert "'other' does not exist" in capsys.readouterr().err


def test_unanswered_message_is_not_resent(server, url, monkeypatch, capsys):
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


def test_unreachable_server_gives_one_line_error(monkeypatch, capsys):
    assert talk(monkeypatch, "http://127.0.0.1:9/v1", "chat", "-q", "a") == 1
    assert "no server answers at this address" in capsys.readouterr().err
    assert talk(monkeypatch, "127.0.0.1:9", "chat", "-q", "a") == 1
    assert "--url: expected http" in capsys.readouterr().err
