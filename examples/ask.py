"""Ask a running server a question and stream the answer: `python ask.py URL QUESTION`.

Needs only Python. Any OpenAI client can do the same with base_url=URL/v1.
"""

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator


def stream_answer(
    url: str, question: str, max_tokens: int, temperature: float, api_key: str | None
) -> Iterator[str]:
    """Yield the pieces of the answer. Raises URLError, or RuntimeError if the stream fails."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
    }
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                return
            if not data:
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                yield choice["delta"].get("content", "")


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask a running server one question.")
    parser.add_argument("url", help="what the server printed, such as http://127.0.0.1:8000")
    parser.add_argument("question")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--api-key")
    arguments = parser.parse_args()
    if not arguments.url.startswith(("http://", "https://")):
        parser.error(f"url: expected such as http://127.0.0.1:8000, found {arguments.url!r}")
    try:
        for text in stream_answer(**vars(arguments)):
            print(text, end="", flush=True)
    except urllib.error.HTTPError as error:
        print(f"the server answers {error.code}: {error.read().decode()}", file=sys.stderr)
        return 1
    except (urllib.error.URLError, ConnectionError, RuntimeError) as error:
        print(f"no answer from {arguments.url}: {error}", file=sys.stderr)
        return 1
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
