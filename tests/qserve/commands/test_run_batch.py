"""`qserve run-batch`: every line gets exactly one answer, even if other lines are wrong."""

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest

from formats.errors import InputError
from qserve.command_line.tool_config import BatchConfig
from qserve.commands import run_batch as module
from qserve.commands.batch_answers import BatchAnswers
from qserve.commands.batch_file import BatchRequest, InvalidLine, read_batch
from qserve.commands.run_batch import run_batch
from qserve.config import EngineConfig
from tests.qserve.fake_engine import PROCESS_DIES

NO_ENGINE = "no_such_module:Engine"


class Killed(Exception):
    """Raised instead of ending the process."""


def line(name, body, url="/v1/completions", **fields) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body, **fields})


def count(name, tokens=3) -> str:
    return line(name, {"prompt": [int(name[1:])], "max_tokens": tokens})


@pytest.fixture
def batch(docs_5m, tmp_path, monkeypatch):
    """Run lines: the exit code, and the answers by custom_id or by the number of a wrong line."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("FAKE_ENGINE_JOURNAL", str(tmp_path / "journal"))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def run(*lines, engine="fake_engine:FakeEngine"):
        source.write_text("\n".join(lines), encoding="utf-8")
        config = BatchConfig(input=str(source), output=str(target))
        code = run_batch(EngineConfig(model=str(docs_5m), max_num_seqs=2), config, engine=engine)
        answers = [json.loads(each) for each in target.read_text().splitlines()]
        found = {(each["error"] or {}).get("line") or each["custom_id"]: each for each in answers}
        assert len(found) == len(answers)
        return code, found

    return run


def partials(folder) -> list[Path]:
    return [*folder.glob("*.partial")]


def test_existing_output_is_replaced(batch, tmp_path):
    (tmp_path / "out.jsonl").write_text(json.dumps({"custom_id": "r1", "error": None}) + "\n")
    assert list(batch(count("r2"))[1]) == ["r2"]
    assert (
        "existing file is replaced" in BatchConfig.__dataclass_fields__["output"].metadata["help"]
    )


def test_every_line_has_a_response(batch, tmp_path, capsys):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    lines = [count(f"r{n}", n + 1) for n in range(20)]
    lines += ["", line("chat", chat, "/v1/chat/completions"), line("bad", {"prompt": []})]
    lines.append(line("response", {"input": "Hi", "max_output_tokens": 3}, "/v1/responses"))
    lines.append(line("vector", {"input": "a"}, "/v1/embeddings"))
    pair, ranked = {"text_1": "a", "text_2": "b"}, {"query": "a", "documents": ["b"]}
    scored = dict.fromkeys(("/score", "/v1/score"), pair)
    scored |= dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), ranked)
    lines += [line(path, body, path) for path, body in scored.items()]
    lines += ['{"custom_id": "half", "meth', line("r3", {}), line("list", {}, "/v1/models")]
    code, found = batch(*lines)
    assert partials(tmp_path) == []
    output = capsys.readouterr()
    assert code == 1 and "32 answers, 10 of them errors" in output.out
    assert "3 of 32 lines cannot be run; line 31: expected a JSON object" in output.err
    for n in range(20):
        response = found[f"r{n}"]["response"]
        assert response["status_code"] == 200 and found[f"r{n}"]["error"] is None
        assert response["body"]["usage"]["completion_tokens"] == n + 1
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert found["response"]["response"]["body"]["usage"]["output_tokens"] == 3
    bad = found["bad"]
    assert bad["response"]["status_code"] == 400 and bad["error"]["code"] == "400"
    assert "prompt" in bad["error"]["message"]
    assert "cannot embed" in found["vector"]["error"]["message"]  # of a language model
    for path in scored:
        assert "cannot score" in found[path]["error"]["message"]
    for number, name, reason in (
        (31, None, "invalid_json_line"),
        (32, "r3", "duplicate_custom_id"),
        (33, "list", "invalid_url"),
    ):
        answer = found[number]
        assert (answer["custom_id"], answer["response"]) == (name, None)
        assert answer["error"]["code"] == reason and answer["id"].startswith("batch_req_")
    assert "line 4" in found[32]["error"]["message"]


@pytest.mark.parametrize(
    ("text", "name", "code", "words"),
    [
        (b"{", None, "invalid_json_line", "expected a JSON object"),
        (b"[]", None, "invalid_json_line", "expected a JSON object with custom_id"),
        (b"[" * 100_000, None, "invalid_json_line", "expected a JSON object"),
        (b'{"custom_id": "\xff"}', None, "invalid_json_line", "utf-8"),
        (line("a", {}, "/v1/models").encode(), "a", "invalid_url", "/v1/models"),
        (line("a", {}, ["/v1/models"]).encode(), "a", "invalid_url", "/v1/models"),
        (line("a", {}, method="GET").encode(), "a", "invalid_method", "POST, found 'GET'"),
        (line("a", {"stream": True}).encode(), "a", "invalid_body", "without stream"),
        (line("a", []).encode(), "a", "invalid_body", "an object"),
        (line(7, {}).encode(), None, "invalid_custom_id", "a string"),
        (b'{"custom_id": "a", "body": {}}', "a", "missing_required_parameter", "no url"),
        (b'{"url": "/v1/completions"}', None, "missing_required_parameter", "no custom_id"),
    ],
)
def test_invalid_line_fails_alone(tmp_path, text, name, code, words):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n" + text + b"\r\n" + line("good", {}).encode())
    wrong, good = read_batch(path)[1]
    assert isinstance(wrong, InvalidLine) and (wrong.line, wrong.custom_id) == (2, name)
    assert wrong.code == code and words in wrong.message and len(wrong.message) < 400
    assert good == BatchRequest(custom_id="good", url="/v1/completions", body={})


def test_custom_id_of_invalid_line_is_reserved(tmp_path):
    """Two answers with the same custom_id could not be distinguished."""
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([line("a", {}, "/v1/models"), line("a", {})]))
    first, second = read_batch(path)[1]
    assert (first.code, second.code) == ("invalid_url", "duplicate_custom_id")


def test_only_newlines_separate_lines(tmp_path):
    path = tmp_path / "in.jsonl"
    text = "a\u2028b\x85c\x0bd"
    entry = {"custom_id": text, "method": "POST", "url": "/v1/completions", "body": {}}
    # JSON escapes only control characters, so the text contains the separators themselves.
    path.write_text("\ufeff" + json.dumps(entry, ensure_ascii=False), encoding="utf-8")
    (request,) = read_batch(path)[1]
    assert request.custom_id == text


def test_invalid_lines_start_no_engine(batch):
    code, found = batch("{", "[]", engine=NO_ENGINE)
    assert code == 1 and [*found] == [1, 2]
    assert batch("", engine=NO_ENGINE) == (0, {})


@pytest.mark.exhaustive
def test_killed_run_resumes(batch, tmp_path, monkeypatch, capsys):
    lines = ["{", *(count(f"r{n}") for n in range(12))]
    write, written = BatchAnswers.write, []

    def killed(self, answer):
        if len(written) == 5:
            raise Killed
        write(self, answer)
        written.append(answer["custom_id"])

    with monkeypatch.context() as patch:
        patch.setattr(BatchAnswers, "write", killed)
        with pytest.raises(Killed):
            batch(*lines)
    assert not (tmp_path / "out.jsonl").exists()
    (partial,) = partials(tmp_path)
    before = partial.read_bytes()
    with partial.open("ab") as file:  # and the machine went down in the middle of a line
        file.write(b'{"id": "batch_req_1", "custom_id": "r11", "resp')
    journal = tmp_path / "journal"
    journal.unlink()
    code, found = batch(*lines)
    assert "already answered: 5 of 13 lines" in capsys.readouterr().err
    assert code == 1 and {*found} == {1, *(f"r{n}" for n in range(12))}
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)
    assert partials(tmp_path) == []
    added = [each for each in journal.read_text().splitlines() if each.startswith("add")]
    assert len(added) == 7


@pytest.mark.exhaustive
def test_changed_input_is_not_resumed(batch, tmp_path, monkeypatch):
    def killed(self, answer):
        write(self, answer)
        raise Killed

    write = BatchAnswers.write
    with monkeypatch.context() as patch:
        patch.setattr(BatchAnswers, "write", killed)
        with pytest.raises(Killed):
            batch(count("r1", tokens=3))
    (partial,) = partials(tmp_path)
    _, found = batch(count("r1", tokens=9))
    assert found["r1"]["response"]["body"]["usage"]["completion_tokens"] == 9
    assert partials(tmp_path) == [partial]


@pytest.mark.exhaustive
def test_engine_exit_loses_no_line(batch, tmp_path):
    lines = [count(f"r{n}") for n in range(8)]
    dies = line("dies", {"prompt": [PROCESS_DIES], "max_tokens": 3})
    with pytest.raises(InputError, match="the engine stopped after .* of 9 lines"):
        batch(*lines, dies)
    assert not (tmp_path / "out.jsonl").exists()
    for partial in partials(tmp_path):
        answers = [json.loads(each) for each in partial.read_text().splitlines()]
        assert all(each["response"]["status_code"] == 200 for each in answers)


def test_one_run_at_a_time(tmp_path):
    first = BatchAnswers(tmp_path / "out.jsonl", "0" * 64)
    with pytest.raises(InputError, match="being written by another run"):
        BatchAnswers(tmp_path / "out.jsonl", "0" * 64)
    first.close()
    assert partials(tmp_path) == []  # nothing was answered
    BatchAnswers(tmp_path / "out.jsonl", "0" * 64).close()


def test_full_disk_is_reported_and_results_kept(tmp_path):
    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    answers = BatchAnswers(tmp_path / "out.jsonl", "0" * 64)
    answers.write({"custom_id": "a", "error": None})
    answers._file = Full(answers._file)
    with pytest.raises(InputError, match="No space left on device .free some space and run"):
        answers.write({"custom_id": "b", "error": None})
    answers.close()
    again = BatchAnswers(tmp_path / "out.jsonl", "0" * 64)
    assert "a" in again.answered and again.num_failed == 0
    again.close()


def test_server_error_is_the_response_of_one_line():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 500})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "Oh."}}'})
        raise RuntimeError("a bug")

    assert asyncio.run(module._post(app, "/", {})) == (500, {"error": {"message": "Oh."}})

    async def silent(scope, receive, send):
        raise RuntimeError("a bug")

    status, reply = asyncio.run(module._post(silent, "/", {}))
    assert status == 500 and "a bug" not in json.dumps(reply)
    assert module._answer("a", status, reply)["error"]["code"] == "500"


def test_unusable_files_are_refused(tmp_path, docs_5m, monkeypatch):
    path = tmp_path / "in.jsonl"
    path.write_text("")
    engine = EngineConfig(model=str(docs_5m))
    with pytest.raises(InputError, match="is also the input"):
        run_batch(engine, BatchConfig(input=str(path), output=str(path)))
    with pytest.raises(InputError, match="cannot be read"):
        run_batch(engine, BatchConfig(input=str(tmp_path / "no"), output=str(path)))
    with pytest.raises(InputError, match="is a folder"):
        run_batch(engine, BatchConfig(input=str(path), output=str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="is a folder"):
        run_batch(engine, BatchConfig(input=str(path), output="."))
    with pytest.raises(InputError, match="No such file or directory"):
        run_batch(engine, BatchConfig(input=str(path), output=str(tmp_path / "no" / "out")))


def test_output_that_is_a_device_or_pipe_is_refused(tmp_path, docs_5m):
    """Renaming the answers to /dev/stdout would replace the device, if root runs the command."""
    os.mkfifo(pipe := tmp_path / "pipe")
    (link := tmp_path / "link").symlink_to(pipe)
    source = tmp_path / "in.jsonl"
    source.write_text(count("r1"))
    for output in (pipe, link, "/dev/null"):
        with pytest.raises(InputError, match="is a pipe or a device"):
            config = BatchConfig(input=str(source), output=str(output))
            run_batch(EngineConfig(model=str(docs_5m)), config)
    assert pipe.is_fifo() and link.is_symlink()


def test_link_to_the_output_stays_a_link(batch, tmp_path):
    """The answers belong to the disk that the link names."""
    (disk := tmp_path / "disk").mkdir()
    (disk / "answers").write_text("old")
    (tmp_path / "out.jsonl").symlink_to(disk / "answers")
    code, answers = batch(count("r1"))
    assert (code, list(answers)) == (0, ["r1"])
    assert (tmp_path / "out.jsonl").is_symlink()
    assert "r1" in (disk / "answers").read_text()
    assert not partials(tmp_path) and not partials(disk)
