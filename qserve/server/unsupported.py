"""Fields of OpenAI's and vLLM's requests that this server knows but does not do.

Setting one to a value that would change the result is an error: an answer that silently ignores it
would be wrong. Fields that nobody knows pass.
"""

from typing import Any

from qserve.server.errors import ApiError

# field: the values that change nothing, besides null
_COMMON: dict[str, tuple] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
COMPLETION = _COMMON | {
    "best_of": (1,),
    "prompt_embeds": (),
    "suffix": ("",),
}
CHAT = _COMMON | {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "return_prompt_text": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
MESSAGE = {"function_call": (), "tool_calls": ([],)}
STREAM_OPTIONS = {"continuous_usage_stats": (False,)}


def refuse(fields: dict[str, Any] | None, table: dict[str, tuple], prefix: str = "") -> None:
    """Raise ApiError for the first field that is set to a value that would change the result."""
    fields = fields or {}
    for name, value in fields.items():
        if name not in table or value is None or _is_neutral(value, table[name]):
            continue
        if name == "tools" and fields.get("tool_choice") == "none":
            continue
        raise ApiError(400, f"{prefix}{name} is not supported by this server yet.", prefix + name)


def _is_neutral(value: object, neutral: tuple) -> bool:
    # 0 == False, but logprobs: 0 asks for something that logprobs: false does not.
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
    )
