"""Let a model call Python functions until it answers: `python tool_loop.py URL QUESTION`.

Needs the openai package, and a server that parses the model's tool calls (it detects the format
from the chat template, or uses --tool-call-parser). `--tool-choice required` works with any model:
then the first answer is a call.
"""

import argparse
import datetime
import json
import sys

import openai

MAX_TURNS = 8


def current_time(zone_hours: int = 0) -> str:
    zone = datetime.timezone(datetime.timedelta(hours=zone_hours))
    return datetime.datetime.now(zone).isoformat(timespec="seconds")


def multiply(a: float, b: float) -> float:
    return a * b


def schema(description: str, properties: dict, required: list[str]) -> dict:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"description": description, "parameters": parameters | {"additionalProperties": False}}


# name: the function, its description for the model
TOOLS = {
    "current_time": (
        current_time,
        schema(
            "The date and time now.",
            {"zone_hours": {"type": "integer", "minimum": -12, "maximum": 14}},
            [],
        ),
    ),
    "multiply": (
        multiply,
        schema(
            "The product of two numbers.",
            {"a": {"type": "number"}, "b": {"type": "number"}},
            ["a", "b"],
        ),
    ),
}


def result_of(name: str, arguments: str) -> str:
    """Run a call and return its result as text, or the error if the call is invalid."""
    try:
        function, _ = TOOLS[name]
        return json.dumps(function(**json.loads(arguments)))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        return f"error: {error}"


def answer(client: openai.OpenAI, question: str, tool_choice: str, max_tokens: int) -> str | None:
    """Return the answer after all tool calls, or None if the limit of rounds is reached."""
    tools = [
        {"type": "function", "function": {"name": name, **described}}
        for name, (_, described) in TOOLS.items()
    ]
    messages: list = [{"role": "user", "content": question}]
    model = client.models.list().data[0].id
    for _ in range(MAX_TURNS):
        reply = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            max_tokens=max_tokens,
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            result = result_of(call.function.name, call.function.arguments)
            print(f"{call.function.name}({call.function.arguments}) -> {result}", file=sys.stderr)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if tool_choice == "required":
            tool_choice = "none"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Let a model call Python functions.")
    parser.add_argument("url", help="what the server printed, such as http://127.0.0.1:8000")
    parser.add_argument("question")
    parser.add_argument("--tool-choice", choices=("auto", "required"), default="auto")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()
    with openai.OpenAI(base_url=f"{options.url.rstrip('/')}/v1", api_key=options.api_key) as client:
        try:
            text = answer(client, options.question, options.tool_choice, options.max_tokens)
        except openai.APIStatusError as error:
            print(f"the server answers {error.status_code}: {error.message}", file=sys.stderr)
            return 1
        except openai.APIError as error:
            print(f"no answer from {options.url}: {error}", file=sys.stderr)
            return 1
    print(text if text is not None else f"no answer after {MAX_TURNS} turns")
    return 0 if text is not None else 1


if __name__ == "__main__":
    sys.exit(main())
