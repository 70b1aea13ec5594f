"""LangChain: a chat, a stream, an object of a schema, a call of a tool: `langchain_tools.py URL`.

Needs langchain-openai, and a server of any model. The schema and the required call work with
every model, because the server constrains its output.
"""

import argparse
import sys
from typing import Annotated

from pydantic import BaseModel, Field

try:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
except ImportError as error:
    sys.exit(f"{error}; this example requires: pip install langchain-openai")


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=99_999_999)


Digit = Annotated[int, Field(ge=0, le=99)]


@tool
def multiply(a: Digit, b: Digit) -> int:
    """The product of two numbers."""
    return a * b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("url", help="such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="", help="the server's name of it; default: any")
    parser.add_argument("--api-key", default="none")
    settings = parser.parse_args()
    model = ChatOpenAI(
        base_url=settings.url,
        api_key=settings.api_key,
        model=settings.model or None,
        temperature=0,
        max_tokens=100,
    )
    print("answer:", repr(model.invoke("What is a trait?").text[:60]))
    print("stream:", len(list(model.stream("What is a trait?"))), "chunks")
    city = model.with_structured_output(City, method="json_schema").invoke("Name a city.")
    print("object:", city)
    assert isinstance(city, City)
    how = {"tool_choice": "required", "parallel_tool_calls": False, "strict": True}
    calling = model.bind_tools([multiply], **how)
    calls = calling.invoke("How much is 6 times 7?").tool_calls
    for call in calls:
        print("call:", call["name"], call["args"], "=", multiply.invoke(call["args"]))
    assert calls


if __name__ == "__main__":
    main()
