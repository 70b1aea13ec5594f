"""`qserve agent-check`: runs the tasks on a server, and prints a table of results."""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from formats.errors import InputError
from formats.table import text_table
from qserve.agent_check.conversation import CheckFailed
from qserve.agent_check.server_process import served
from qserve.agent_check.session import APIS, Session
from qserve.agent_check.settings import AgentCheckConfig
from qserve.agent_check.tasks import TASKS, Task
from qserve.commands.client_http import ServerClient, ServerError
from qserve.errors import LEAVE_OUT

KEYS = ("QSERVE_API_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY")
PASSED, FAILED, NOT_RUN = "ok", "FAILED", "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one task on one API."""

    task: str
    api: str
    streams: bool
    seconds: float
    problem: str | None = None  # None: passed


def check(target: str, config: AgentCheckConfig) -> int:
    """Run all tasks against a server's URL, or start a server for a model folder.

    Returns the exit code: 0 if all tasks passed.
    """
    is_url = target.startswith(("http://", "https://"))
    if is_url and config.server_args:
        raise InputError("--server-args", f"{target} is a running server", "remove the flag")
    server = contextlib.nullcontext(target) if is_url else served(target, config.server_args)
    with server as url:
        outcomes = run_tasks(url, config)
    if config.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    else:
        print(report(outcomes))
    return int(any(outcome.problem for outcome in outcomes))


def run_tasks(url: str, config: AgentCheckConfig) -> list[Outcome]:
    """Run the tasks against a server. Raises InputError if it does not list its models."""
    known = [task.name for task in TASKS]
    for name in config.task:
        if name not in known:
            raise InputError(
                "--task", f"expected some of {', '.join(known)}, found {name!r}", LEAVE_OUT
            )
    key = config.api_key or next(filter(None, map(os.environ.get, KEYS)), None)
    client = ServerClient(url, key)
    return [
        _outcome(task, session)
        for session in _sessions(client, _model(client, config), config)
        for task in TASKS
        if session.streams or not task.streams_only
        if not config.task or task.name in config.task
    ]


def report(outcomes: Sequence[Outcome]) -> str:
    """Return a table (a row per task, two columns per API), then the failures."""
    columns = list(dict.fromkeys((outcome.api, outcome.streams) for outcome in outcomes))
    of_place = {(each.task, each.api, each.streams): each for each in outcomes}
    rows = []
    for task in dict.fromkeys(outcome.task for outcome in outcomes):
        found = [of_place.get((task, *column)) for column in columns]
        rows.append([task, *map(_cell, found)])
    header = ["task", *(api + " stream" * streams for api, streams in columns)]
    failures = [
        f"{each.task}, {each.api}{' stream' * each.streams}: {each.problem}"
        for each in outcomes
        if each.problem
    ]
    num_passed = len(outcomes) - len(failures)
    ending = f"{num_passed} of {len(outcomes)} passed"
    return "\n".join([text_table(header, rows), "", *failures, ending])


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return NOT_RUN
    return FAILED if outcome.problem else PASSED


def _model(client: ServerClient, config: AgentCheckConfig) -> str:
    if config.model_name is not None:
        return config.model_name
    try:
        return client.get("/models")["data"][0]["id"]
    except (ServerError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            "the server", f"does not list its models: {error}", "set --model-name"
        ) from error


def _sessions(client: ServerClient, model: str, config: AgentCheckConfig) -> list[Session]:
    return [
        Session(
            client=client,
            api=api,
            model=model,
            streams=streams,
            is_forced=config.forced,
            max_tokens=config.max_tokens,
        )
        for api in APIS
        if not config.api or api in config.api
        for streams in (False, True)
    ]


def _outcome(task: Task, session: Session) -> Outcome:
    start, problem = time.monotonic(), None
    try:
        task.run(session)
    except (CheckFailed, ServerError, InputError) as error:
        problem = str(error)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # The reply lacks a required field, or a field has the wrong type.
        problem = f"the reply has an unexpected form: {type(error).__name__}: {error}"
    except OSError as error:
        problem = f"the connection broke: {error}"
    return Outcome(
        task=task.name,
        api=session.api,
        streams=session.streams,
        seconds=round(time.monotonic() - start, 3),
        problem=problem,
    )
