"""LangChain: images as blocks of a message, in the forms it has: `langchain_images.py URL`.

Needs langchain-openai and Pillow, and a server of a vision-language model. The image is sent as
LangChain's own block, as OpenAI's part, and over the Responses API.
"""

import argparse
import base64
import io
import sys

try:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI
    from PIL import Image
except ImportError as error:
    sys.exit(f"{error}; this example requires: pip install langchain-openai pillow")


def picture() -> str:
    """A red PNG in base64."""
    stored = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(stored, "PNG")
    return base64.b64encode(stored.getvalue()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("url", help="such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="", help="the server's name of it; default: any")
    parser.add_argument("--api-key", default="none")
    settings = parser.parse_args()
    given = {
        "base_url": settings.url,
        "api_key": settings.api_key,
        "model": settings.model or None,
        "temperature": 0,
        "max_tokens": 20,
    }
    data = picture()
    question = {"type": "text", "text": "Which color is it?"}
    url = f"data:image/png;base64,{data}"
    blocks = {
        "block": {"type": "image", "base64": data, "mime_type": "image/png"},
        "part": {"type": "image_url", "image_url": {"url": url, "detail": "auto"}},
    }
    answers = {}
    for name, block in blocks.items():
        answers[name] = ChatOpenAI(**given).invoke([HumanMessage([question, block])])
    message = HumanMessage([question, blocks["block"]])
    answers["responses"] = ChatOpenAI(**given, use_responses_api=True).invoke([message])
    text = ChatOpenAI(**given).invoke([HumanMessage([question])])
    for name, answer in answers.items():
        print(f"{name}:", repr(answer.text[:60]), answer.usage_metadata["input_tokens"])
        assert answer.usage_metadata["input_tokens"] > text.usage_metadata["input_tokens"]
    assert answers["block"].text == answers["part"].text
    chunks = list(ChatOpenAI(**given).stream([HumanMessage([question, blocks["part"]])]))
    print("stream:", len(chunks), "chunks")
    assert "".join(chunk.text for chunk in chunks) == answers["part"].text


if __name__ == "__main__":
    main()
