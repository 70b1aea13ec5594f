"""Errors for flags that a command does not have: the nearest one, or what replaces vLLM's."""

import difflib
from collections.abc import Iterable

# Flag of `vllm serve` -> what to do instead.
VLLM_FLAGS = {
    "--chat-template": "the template is the model's own: edit chat_template.jinja in its folder",
    "--cpu-offload-gb": "weights stay on the GPU: fewer bits, such as --quantization w4a16",
    "--disable-log-requests": "requests are not logged: leave it out",
    "--disable-log-stats": "figures are at /metrics, not in the log: leave it out",
    "--enable-chunked-prefill": "long prompts are always computed in chunks: leave it out",
    "--generation-config": "defaults come from generation_config.json in the model's folder",
    "--guided-decoding-backend": "there is one: leave it out",
    "--max-logprobs": "it is 20: leave it out",
    "--no-enable-log-requests": "requests are not logged: leave it out",
    "--override-generation-config": "edit generation_config.json in the model's folder",
    "--runner": "it follows from the model's files: leave it out",
    "--swap-space": "tokens of preempted requests are computed again: leave it out",
    "--task": "it follows from the model's files: leave it out",
    "--trust-remote-code": "code in model folders is never run: leave it out",
    "--uvicorn-log-level": "use --log-level",
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a misspelt one, if any is."""
    words = {each.lstrip("-"): each for each in known}
    found = difflib.get_close_matches(name.lstrip("-"), list(words), 1)
    return words[found[0]] if found else None


def unknown_arguments(arguments: list[str], known: Iterable[str]) -> str:
    """Return the problem and its remedy; `arguments`: those that a command has no meaning for."""
    first = arguments[0].partition("=")[0]
    if not first.startswith("-"):
        return f"unexpected argument {first!r}"
    remedy = VLLM_FLAGS.get(first)
    if remedy is None:
        like = nearest(first, known)
        remedy = None if like is None else f"did you mean {like}?"
    return f"{first}: unknown flag" + (f"; {remedy}" if remedy else "")
