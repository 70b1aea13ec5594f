"""Instructor: an object of a schema, asked for in three ways.

python examples/clients/instructor_object.py URL --model NAME

Needs instructor, and a server of any model: it constrains the output.
"""

import argparse
import sys

from pydantic import BaseModel, ConfigDict, Field

try:
    import instructor
    import openai
except ImportError as error:
    sys.exit(f"{error}; this example requires: pip install instructor")


class City(BaseModel):
    """A city. Without other properties, which a weak model would add until its limit."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=99_999_999)


# JSON alone leaves the schema to the prompt, which a small model does not follow.
MODES = (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(".")[0])
    parser.add_argument("url", help="such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True, help="the server's name of it")
    parser.add_argument("--api-key", default="none")
    settings = parser.parse_args()
    client = openai.OpenAI(base_url=settings.url, api_key=settings.api_key)
    for mode in MODES:
        found = instructor.from_openai(client, mode=mode).chat.completions.create(
            model=settings.model,
            response_model=City,
            messages=[{"role": "user", "content": "Name a city."}],
            max_tokens=100,
            max_retries=0,
        )
        print(f"{mode.value}:", found)
        assert isinstance(found, City)


if __name__ == "__main__":
    main()
