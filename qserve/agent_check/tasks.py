"""The agent tasks: a table of functions that raise CheckFailed.

Each task runs on every API, streamed and not streamed. With --forced, a task checks what the server
guarantees for any model: calls of known tools with valid arguments. Without it, a task also checks
that the model chooses the right tool and arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass

from qserve.agent_check.conversation import (
    AUTO,
    NONE,
    REQUIRED,
    Answer,
    Ask,
    Call,
    Result,
    Tool,
    expect,
)
from qserve.agent_check.schema import fault
from qserve.agent_check.session import Session, names

NUM_TOOLS = 120  # tools in the task with a long list
NUM_CANCELLED = 4

CITY = {"type": "string", "description": "Name of a city.", "minLength": 1, "maxLength": 16}
WEATHER = Tool(
    name="get_weather",
    description="Return the current weather in a city.",
    schema={
        "type": "object",
        "properties": {"city": CITY},
        "required": ["city"],
        "additionalProperties": False,
    },
)
FLIGHTS = Tool(
    name="search_flights",
    description="List the flights between two cities on a day.",
    schema={
        "type": "object",
        "properties": {
            "start": CITY,
            "destination": CITY,
            "day": {"type": "integer", "minimum": 1, "maximum": 31},
        },
        "required": ["start", "destination", "day"],
        "additionalProperties": False,
    },
)
BOOKING = Tool(
    name="book_table",
    description="Book a table in a restaurant.",
    schema={
        "type": "object",
        "properties": {
            "people": {"type": "integer", "minimum": 1, "maximum": 20},
            "meal": {"type": "string", "enum": ["breakfast", "lunch", "dinner"]},
            "outside": {"type": "boolean"},
            "guest": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 16}},
                "required": ["name"],
                "additionalProperties": False,
            },
            "wishes": {
                "type": "array",
                "items": {"type": "string", "enum": ["window", "quiet", "vegan"]},
                "maxItems": 2,
            },
        },
        "required": ["people", "meal", "outside", "guest", "wishes"],
        "additionalProperties": False,
    },
)
TOOLS = (WEATHER, FLIGHTS, BOOKING)
OSLO = "What is the weather in Oslo? Use a tool."
BOOK = "Book a table outside for 4 people, for dinner, for Ada, in a quiet place."


def _calls(answer: Answer, tools: tuple[Tool, ...]) -> tuple[Call, ...]:
    """Return the calls of a reply. Checks for known names, valid arguments, unique ids."""
    calls = answer.calls[: len(answer.calls) - answer.is_cut]  # the last one may be incomplete
    expect(calls, f"no call; text: {answer.text!r:.100}")
    schemas = {tool.name: tool.schema for tool in tools}
    for call in calls:
        expect(call.name in schemas, f"a call of the unknown tool {call.name!r:.60}")
        expect(call.arguments is not None, f"the arguments of {call.name} are not a JSON object")
        problem = fault(schemas[call.name], call.arguments)
        expect(problem is None, f"{call.name}: {problem}")
    expect(len({call.id for call in calls}) == len(calls), "two calls have the same id")
    return calls


def _choice(session: Session, forced: str) -> str:
    return forced if session.is_forced else AUTO


def _one_call(session: Session, text: str, tool: Tool, *history: object) -> tuple[Answer, Call]:
    """Ask for one call of a tool. Returns the reply and its call."""
    ask = Ask(
        turns=(*history, text) if text else history,
        tools=TOOLS,
        choice=_choice(session, tool.name),
        is_parallel=False,
        max_tokens=session.max_tokens,
    )
    answer = session.ask(ask)
    calls = _calls(answer, TOOLS)
    expect(len(calls) == 1, f"{len(calls)} calls where parallel calls are disabled")
    expect(calls[0].name == tool.name, f"expected a call of {tool.name}, found {names(calls)}")
    return answer, calls[0]


def choose_a_tool(session: Session) -> None:
    _, call = _one_call(session, OSLO, WEATHER)
    if not session.is_forced:
        expect("oslo" in call.arguments["city"].lower(), f"the city is {call.arguments['city']!r}")


def named_tool(session: Session) -> None:
    ask = Ask(turns=(BOOK,), tools=TOOLS, choice=BOOKING.name, max_tokens=session.max_tokens)
    calls = _calls(session.ask(ask), TOOLS)
    expect(
        names(calls) == [BOOKING.name],
        f"expected one call of {BOOKING.name}, found {names(calls)}",
    )
    if not session.is_forced:
        people, meal = (calls[0].arguments[name] for name in ("people", "meal"))
        expect((people, meal) == (4, "dinner"), f"found {people} people and {meal}")


def required_tool(session: Session) -> None:
    ask = Ask(
        turns=("Hello!",),
        tools=TOOLS,
        choice=REQUIRED,
        is_parallel=False,
        max_tokens=session.max_tokens,
    )
    calls = _calls(session.ask(ask), TOOLS)
    expect(len(calls) == 1, f"{len(calls)} calls where parallel calls are disabled")


def no_tool(session: Session) -> None:
    answer = session.ask(
        Ask(turns=(OSLO,), tools=TOOLS, choice=NONE, max_tokens=session.max_tokens)
    )
    expect(not answer.calls, f"calls of {names(answer.calls)} although no call is allowed")


def parallel_calls(session: Session) -> None:
    text = "What is the weather in Oslo and in Rome? Call the tool once for each city, together."
    ask = Ask(
        turns=(text,),
        tools=(WEATHER,),
        choice=_choice(session, REQUIRED),
        max_tokens=session.max_tokens,
    )
    calls = _calls(session.ask(ask), (WEATHER,))
    if not session.is_forced:
        cities = {call.arguments["city"].lower()[:4] for call in calls}
        expect(cities == {"oslo", "rome"}, f"expected Oslo and Rome, found {sorted(cities)}")


def _final(session: Session, *history: object) -> Answer:
    """Ask for a reply without calls, and return it."""
    ask = Ask(
        turns=history,
        tools=TOOLS,
        choice=_choice(session, NONE),
        max_tokens=session.max_tokens,
    )
    answer = session.ask(ask)
    expect(not answer.calls, f"further calls of {names(answer.calls)}")
    return answer


def use_a_result(session: Session) -> None:
    called, call = _one_call(session, OSLO, WEATHER)
    result = Result(call=call, text='{"degrees": 21, "sky": "clear"}')
    answer = _final(session, OSLO, called, (result,))
    if not session.is_forced:
        expect("21" in answer.text, f"the answer lacks the result: {answer.text!r:.100}")


def two_rounds(session: Session) -> None:
    called, call = _one_call(session, OSLO, WEATHER)
    first = (OSLO, called, (Result(call=call, text="21 degrees, clear"),))
    said = _final(session, *first)
    again, second = _one_call(session, BOOK, BOOKING, *first, said)
    expect(second.id != call.id, "two calls of a conversation have the same id")
    _final(session, *first, said, BOOK, again, (Result(call=second, text="Booked: A17"),))


def failed_tool(session: Session) -> None:
    called, call = _one_call(session, OSLO, WEATHER)
    result = Result(call=call, text="Error: the service is down", is_error=True)
    _final(session, OSLO, called, (result,))


def long_tool_list(session: Session) -> None:
    tools = tuple(
        Tool(
            name=f"convert_{index:03}",
            description=f"Convert an amount of currency number {index} to euros.",
            schema={
                "type": "object",
                "properties": {"amount": {"type": "integer", "minimum": 0, "maximum": 9999}},
                "required": ["amount"],
                "additionalProperties": False,
            },
        )
        for index in range(NUM_TOOLS)
    )
    ask = Ask(
        turns=("Convert 250 of currency number 77 to euros with the tool convert_077.",),
        tools=tools,
        choice=_choice(session, "convert_077"),
        is_parallel=False,
        max_tokens=session.max_tokens,
    )
    calls = _calls(session.ask(ask), tools)
    expect(names(calls) == ["convert_077"], f"expected convert_077, found {names(calls)}")


def streamed_as_whole(session: Session) -> None:
    """Check that at temperature 0 a stream has the same text and calls as a whole reply."""
    ask = Ask(turns=(BOOK,), tools=TOOLS, choice=BOOKING.name, max_tokens=session.max_tokens)
    plain = Ask(turns=("Count to five.",), max_tokens=48)
    for each in (ask, plain):
        found, other = (session.ask(each, streams=streams) for streams in (False, True))
        expect(
            found.text == other.text,
            f"the texts differ: {found.text!r:.60} and {other.text!r:.60}",
        )
        pairs = [[(call.name, call.arguments) for call in one.calls] for one in (found, other)]
        expect(pairs[0] == pairs[1], f"the calls differ: {pairs!r:.200}")


def cancelled_streams(session: Session) -> None:
    long = Ask(turns=("Write a long story.",), max_tokens=session.max_tokens)
    for _ in range(NUM_CANCELLED):
        session.begin(long, 2)
    session.until_idle(session.load)
    answer = session.ask(Ask(turns=("Hello!",), max_tokens=16))
    expect(answer.is_cut or answer.text, "no answer after cancelled streams")


def bad_request(session: Session) -> None:
    ask = Ask(turns=(OSLO,), tools=TOOLS, choice="no_such_tool", max_tokens=16)
    message = session.refusal(ask)
    expect("no_such_tool" in message, f"the error does not name the tool: {message:.100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    name: str
    run: Callable[[Session], None]
    streams_only: bool = False  # True: runs only with streamed replies


TASKS = (
    Task(name="choose-a-tool", run=choose_a_tool),
    Task(name="named-tool", run=named_tool),
    Task(name="required-tool", run=required_tool),
    Task(name="no-tool", run=no_tool),
    Task(name="parallel-calls", run=parallel_calls),
    Task(name="use-a-result", run=use_a_result),
    Task(name="two-rounds", run=two_rounds),
    Task(name="failed-tool", run=failed_tool),
    Task(name="long-tool-list", run=long_tool_list),
    Task(name="bad-request", run=bad_request),
    Task(name="streamed-as-whole", run=streamed_as_whole, streams_only=True),
    Task(name="cancelled-streams", run=cancelled_streams, streams_only=True),
)
