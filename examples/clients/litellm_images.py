"""LiteLLM: images in chats, in Anthropic's messages and in responses: `litellm_images.py URL`.

Needs litellm and Pillow, and a server of a vision-language model. `anthropic/` and `openai/` say
which of the server's APIs LiteLLM calls.
"""

import argparse
import base64
import io
import sys

try:
    import litellm
    from PIL import Image
except ImportError as error:
    sys.exit(f"{error}; this example requires: pip install litellm pillow")


def picture() -> str:
    """A red PNG as a data: URL."""
    stored = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(stored, "PNG")
    return "data:image/png;base64," + base64.b64encode(stored.getvalue()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("url", help="such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="default", help="the server's name of it")
    parser.add_argument("--api-key", default="none")
    settings = parser.parse_args()
    openai = {"api_base": settings.url, "api_key": settings.api_key}
    anthropic = {**openai, "api_base": settings.url.removesuffix("/v1")}
    question = {"type": "text", "text": "Which color is it?"}
    image = {"type": "image_url", "image_url": {"url": picture()}}
    plain = [{"role": "user", "content": [question]}]
    messages = [{"role": "user", "content": [question, image]}]
    limits = {"max_tokens": 20, "temperature": 0}
    for name, where in (("openai", openai), ("anthropic", anthropic)):
        model = f"{name}/{settings.model}"
        text = litellm.completion(model=model, messages=plain, **limits, **where)
        seen = litellm.completion(model=model, messages=messages, **limits, **where)
        print(f"{name}:", repr(seen.choices[0].message.content[:60]), seen.usage.prompt_tokens)
        assert seen.usage.prompt_tokens > text.usage.prompt_tokens
        chunks = litellm.completion(model=model, messages=messages, stream=True, **limits, **where)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert streamed == seen.choices[0].message.content
    parts = [
        {"type": "input_text", "text": question["text"]},
        {"type": "input_image", "image_url": picture(), "detail": "auto"},
    ]
    response = litellm.responses(
        model=f"openai/{settings.model}",
        input=[{"role": "user", "content": parts}],
        max_output_tokens=20,
        temperature=0,
        **openai,
    )
    print("responses:", repr(response.output[0].content[0].text[:60]), response.usage.input_tokens)


if __name__ == "__main__":
    main()
