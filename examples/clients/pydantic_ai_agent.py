"""Pydantic AI: agents whose answer is an object, in two ways.

python examples/clients/pydantic_ai_agent.py URL --model NAME

Needs pydantic-ai-slim[openai], and a server of any model: it constrains the output.
"""

import argparse
import sys

from pydantic import BaseModel, Field

try:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
except ImportError as error:
    sys.exit(f"{error}; this example requires: pip install 'pydantic-ai-slim[openai]'")


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=99_999_999)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(".")[0])
    parser.add_argument("url", help="such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True, help="the server's name of it")
    parser.add_argument("--api-key", default="none")
    settings = parser.parse_args()
    provider = OpenAIProvider(base_url=settings.url, api_key=settings.api_key)
    model = OpenAIChatModel(settings.model, provider=provider)
    for name, output in (("by a tool", City), ("by a schema", NativeOutput(City))):
        agent = Agent(model, output_type=output, model_settings={"max_tokens": 100, "seed": 1})
        found = agent.run_sync("Name a city.")
        print(f"{name}:", found.output, found.usage)
        assert isinstance(found.output, City)


if __name__ == "__main__":
    main()
