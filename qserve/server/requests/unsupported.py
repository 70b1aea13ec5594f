"""Tables of unsupported request fields.

A request that sets one to a value that would change the result is refused, since the result would
silently be wrong. The error names the alternative if there is one. Unknown fields and fields
without effect are accepted, and the reply header `x-ignored-fields` lists them.
"""

from typing import Any

from qserve.server.http.errors import ApiError

# field -> values besides null that are accepted, since they have no effect
COMMON: dict[str, tuple] = {
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "no_stop_trim": (False,),  # some routers add it to each body
    "prompt_embeds": (),
    "repetition_detection": (),
    "thinking_token_budget": (),
}
# field of another server or an older vLLM -> equivalent here
_INSTEAD = {
    "beam_width": "use_beam_search with n, and best_of for more beams than choices",
    "ebnf": 'structured_outputs: {"grammar": ...}',
    "grammar": 'structured_outputs: {"grammar": ...}',
    "guided_choice": 'structured_outputs: {"choice": ...}',
    "guided_decoding_backend": "structured_outputs",
    "guided_grammar": 'structured_outputs: {"grammar": ...}',
    "guided_json": 'structured_outputs: {"json": ...}',
    "guided_regex": 'structured_outputs: {"regex": ...}',
    "guided_whitespace_pattern": "structured_outputs",
    "input_ids": "prompt on /v1/completions",
    "json_schema": 'structured_outputs: {"json": ...}',
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "num_predict": "max_tokens",
    "regex": 'structured_outputs: {"regex": ...}',
    "repeat_penalty": "repetition_penalty",
    "return_logprob": "logprobs",
    "sampling_params": "its fields as fields of the body",
    "stop_regex": "stop",
    "structural_tag": 'structured_outputs: {"structural_tag": ...}',
    "top_logprobs_num": "top_logprobs",
}
HINTS = {name: f"use {other}" for name, other in _INSTEAD.items()} | {
    "messages": "use /v1/chat/completions",
    "prompt": "use messages, or /v1/completions",
    "top_logprobs": "use logprobs: N",
}
COMMON = dict.fromkeys(_INSTEAD, ()) | COMMON
COMPLETION = COMMON | {
    "messages": (),
    "suffix": ("",),
    "top_logprobs": (),
}
CHAT = COMMON | {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prompt": (),
    "return_prompt_text": (False,),
    "suffix": ("",),
    "web_search_options": (),
}
# route name -> table
TABLES = {"completions": COMPLETION, "chat": CHAT}
MESSAGE = {"function_call": ()}
# fields that are validated but have no effect
WITHOUT_EFFECT = ("user", "service_tier", "store", "metadata")


def refuse(
    fields: dict[str, Any] | None,
    table: dict[str, tuple],
    prefix: str = "",
    hints: dict[str, str] = HINTS,
) -> None:
    """Raise ApiError for the first unsupported field whose value would have an effect."""
    fields = fields or {}
    for name, value in fields.items():
        if name not in table or value is None or _is_neutral(value, table[name]):
            continue
        remedy = f"; {hints[name]}" if name in hints else ""
        raise ApiError(
            400, f"{prefix}{name} is not supported by this server{remedy}.", prefix + name
        )


def unknown(fields: dict[str, Any] | None, table: dict[str, tuple]) -> list[str]:
    """Return the names of fields that are set and not in `table`."""
    fields = fields or {}
    return [name for name, value in fields.items() if name not in table and value is not None]


def _is_neutral(value: object, neutral: tuple) -> bool:
    # Compare types, too: 0 == False, but logprobs: 0 and logprobs: false differ in meaning.
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
    )
