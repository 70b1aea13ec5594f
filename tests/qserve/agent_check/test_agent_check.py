"""`qserve agent-check`: it passes on our server, and finds the faults of others."""

import itertools
import json

import jsonschema
import pytest

from qserve.agent_check import chat_api, messages_api, responses_api
from qserve.agent_check.check import report, run_tasks
from qserve.agent_check.conversation import Ask, CheckFailed
from qserve.agent_check.schema import fault
from qserve.agent_check.settings import AgentCheckConfig
from qserve.agent_check.tasks import BOOKING, TASKS, TOOLS, WEATHER
from qserve.cli import main
from qserve.config import ServerConfig
from tests.qserve.command_line import fails_with

APIS = {"chat": chat_api, "responses": responses_api, "messages": messages_api}


@pytest.fixture(scope="module")
def url(start_server, docs_5m):
    return start_server(docs_5m, "--served-model-name", "docs").url


FEW = ("named-tool", "use-a-result", "cancelled-streams")


@pytest.mark.exhaustive
@pytest.mark.parametrize("tasks", [FEW, pytest.param((), marks=pytest.mark.exhaustive)])
def test_server_with_forced_tools_passes(url, capsys, tasks):
    """The bundled model's choices are noise; grammars make the calls."""
    arguments = ["agent-check", url, "--forced", "--max-tokens", "120"]
    code = main([*arguments, *(("--task", *tasks) if tasks else ())])
    printed = capsys.readouterr().out
    assert code == 0, printed
    run = [task for task in TASKS if not tasks or task.name in tasks]
    num_runs = len(APIS) * (2 * len(run) - sum(task.streams_only for task in run))
    assert printed.strip().endswith(f"{num_runs} of {num_runs} passed")
    assert all(task.name in printed for task in run) and "messages stream" in printed


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("no call", "are not a JSON object"),
        ('{"city": 3}', "arguments.city: expected string, found 3"),
        ('{"city": "Oslo", "odd": 1}', "unexpected ['odd']"),
        ('{"town": "Oslo"}', "city is missing"),
        ('{"city": "Oslo"', "are not a JSON object"),
    ],
)
def test_wrong_call_is_reported(make_server, run_live, capsys, script, reason):
    """The scripted engine ignores grammars, as a broken server would."""
    server = make_server(ServerConfig())
    server.client.text = script
    base = f"http://127.0.0.1:{run_live(server)}"
    arguments = ["--forced", "--api", "chat", "--json", "--max-tokens", "100"]
    assert main(["agent-check", base, *arguments]) == 1
    found = json.loads(capsys.readouterr().out)
    problems = [each["problem"] for each in found if each["task"] == "choose-a-tool"]
    assert len(problems) == 2 and all(reason in problem for problem in problems)


def test_server_without_messages_api_fails(make_server, run_live):
    """Old servers answer 404 on /v1/messages."""
    server = make_server(ServerConfig())
    routes = server.app.router.routes
    server.app.router.routes = [each for each in routes if each.path != "/v1/messages"]
    base = f"http://127.0.0.1:{run_live(server)}/v1"
    outcomes = run_tasks(base, AgentCheckConfig(forced=True, api=["messages"]))
    assert all("Not Found" in each.problem for each in outcomes if each.task != "bad-request")
    assert "0 of" in report(outcomes)


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def stream_of(server, api):
    """Events of our server's answer with a text and a call."""
    server.client.text = f"Let me look.\n{CALL}"
    ask = Ask(turns=("Oslo?",), tools=TOOLS, max_tokens=200)
    body = api.body(ask) | {"model": server.app.state.service.model_name, "stream": True}
    lines = server.post(f"/v1{api.PATH}", body).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return [json.loads(each) for each in data]


@pytest.mark.parametrize("name", APIS)
def test_invalid_streams_are_reported(make_server, name):
    config = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    server, api = make_server(ServerConfig(**config)), APIS[name]
    events = stream_of(server, api)
    answer = api.streamed(events)
    assert "Let me look." in answer.text and answer.calls[0].arguments == {"city": "Oslo"}
    # An event that is lost or comes twice is noticed: by the rules, or in what the answer says.
    for place in range(len(events)):
        if events[place]["type" if name != "chat" else "object"] == "ping":
            continue
        lost, twice = events[:place] + events[place + 1 :], [*events]
        twice.insert(place, events[place])
        for broken in (lost, twice):
            try:
                found = api.streamed(broken)
            except (CheckFailed, LookupError, TypeError):
                continue
            is_empty = name == "chat" and not any(
                choice["delta"].get("content") or choice["delta"].get("tool_calls")
                for choice in events[place]["choices"]
            )
            assert is_empty or (found.text, found.calls) != (answer.text, answer.calls), place


@pytest.mark.parametrize("name", APIS)
def test_index_gaps_are_reported(make_server, name):
    """Clients store blocks, items and calls by index."""
    config = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    server, api = make_server(ServerConfig(**config)), APIS[name]
    events = json.loads(json.dumps(stream_of(server, api)))
    key = {"messages": "index", "responses": "output_index"}.get(name)
    for event in events:
        for part in event.get("choices", ()):
            for call in part["delta"].get("tool_calls", ()):
                call["index"] += 1
        if event.get(key, 0) > 0:
            event[key] += 1
    with pytest.raises(CheckFailed, match="have a gap"):
        api.streamed(events)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_argument_errors_equal_jsonschema(tool):
    values = {
        "city": ["Oslo", "", "x" * 17, 3, None],
        "start": ["Oslo", ""],
        "destination": ["Rome"],
        "day": [1, 31, 32, 0, 1.5, True, "1"],
        "people": [4, 21],
        "meal": ["dinner", "supper"],
        "outside": [True, 1],
        "guest": [{"name": "Ada"}, {}, {"name": "Ada", "age": 3}, []],
        "wishes": [[], ["quiet", "vegan"], ["quiet"] * 3, ["loud"], "quiet"],
    }
    names = [*tool.schema["properties"]]
    count = 0
    for chosen in itertools.product(*(values[name] for name in names)):
        whole = dict(zip(names, chosen, strict=True))
        for value in (whole, whole | {"odd": 1}):
            is_valid = jsonschema.Draft202012Validator(tool.schema).is_valid(value)
            assert (fault(tool.schema, value) is None) == is_valid, value
            count += is_valid
    assert count
    with pytest.raises(ValueError, match="pattern"):
        fault({"pattern": "a"}, "a")


@pytest.mark.exhaustive
def test_command_that_cannot_start_is_reported(capsys, tmp_path):
    fails_with(capsys, ["agent-check", "http://127.0.0.1:1"], "no server answers")
    fails_with(capsys, ["agent-check", "http://127.0.0.1:1", "--api", "x"], "--api", "chat")
    url = ["--model-name", "m", "--task", "x"]
    fails_with(capsys, ["agent-check", "http://127.0.0.1:1", *url], "--task", "named-tool")
    arguments = ["agent-check", "http://127.0.0.1:1", "--server-args=--port=1"]
    fails_with(capsys, arguments, "--server-args", "running server")
    fails_with(capsys, ["agent-check", str(tmp_path / "none")], "did not start")


def test_every_tool_of_the_tasks_bounds_its_arguments():
    """So that a weak model's forced call ends before its token limit."""
    assert {tool.name for tool in TOOLS} == {WEATHER.name, BOOKING.name, "search_flights"}
    for tool in TOOLS:
        assert tool.schema["additionalProperties"] is False
        assert tool.schema["required"] == [*tool.schema["properties"]]
