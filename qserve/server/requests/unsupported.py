"""Tables of unsupported request fields.

A request that sets one to a value that would change the result is refused, since the result would
silently be wrong. The error names the alternative if there is one. Unknown fields and fields
without effect are accepted, and the reply header `x-ignored-fields` lists them.
"""

from typing import Any

from qserve.server.http.errors import ApiError

# field -> values besides null that are accepted, since they have no effect
COMMON: dict[str, tuple] = {
    "adapter_id": (),
    "custom_logit_processor": (),
    "do_sample": (True,),
    "format": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "lora_request": ({},),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "no_stop_trim": (False,),  # some routers add it to each body
    "prompt_embeds": (),
    "repeat_penalty": (1,),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "thinking_token_budget": (-1,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
# fields of other servers that turn reasoning, or its separation from the answer, on or off
REASONING: dict[str, tuple] = {
    "enable_thinking": (),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "think": (),
    "thinking": (),
}
# field of another server or an older vLLM -> equivalent here
_INSTEAD = {
    "adapter_id": "model: NAME of the adapter",
    "beam_width": "use_beam_search with n, and best_of for more beams than choices",
    "do_sample": "temperature: 0",
    "ebnf": 'structured_outputs: {"grammar": ...}',
    "enable_thinking": 'chat_template_kwargs: {"enable_thinking": ...}',
    "format": "response_format",
    "function_call": "tool_choice",
    "functions": "tools",
    "grammar": 'structured_outputs: {"grammar": ...}',
    "guided_choice": 'structured_outputs: {"choice": ...}',
    "guided_decoding_backend": "structured_outputs",
    "guided_grammar": 'structured_outputs: {"grammar": ...}',
    "guided_json": 'structured_outputs: {"json": ...}',
    "guided_regex": 'structured_outputs: {"regex": ...}',
    "guided_whitespace_pattern": "structured_outputs",
    "input_ids": "prompt on /v1/completions",
    "json_schema": 'structured_outputs: {"json": ...}',
    "logprob_token_ids": "logprobs with up to 20 alternatives",
    "lora_path": "model: NAME of the adapter",
    "lora_request": "model: NAME of the adapter",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "num_predict": "max_tokens",
    "reasoning": "reasoning_effort",
    "regex": 'structured_outputs: {"regex": ...}',
    "repeat_penalty": "repetition_penalty",
    "repetition_detection": "repetition_penalty",
    "return_hidden_states": "/pooling",
    "return_logprob": "logprobs",
    "sampling_params": "its fields as fields of the body",
    "stop_regex": "stop",
    "stream_reasoning": "stream: false, or ignore the deltas of reasoning_content",
    "structural_tag": 'structured_outputs: {"structural_tag": ...}',
    "think": 'chat_template_kwargs: {"enable_thinking": ...}',
    "thinking": 'chat_template_kwargs: {"enable_thinking": ...} or {"thinking": ...}',
    "thinking_token_budget": "max_tokens, or reasoning_effort if the model's template reads it",
    "top_logprobs_num": "top_logprobs",
}
HINTS = {name: f"use {other}" for name, other in _INSTEAD.items()} | {
    "audio": "ask for text",
    "chat_template": "render the prompt and send it to /v1/completions",
    "custom_logit_processor": "use logit_bias, allowed_token_ids or bad_words",
    "documents": "put their texts into messages",
    "echo": "put the last message before the answer yourself",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "media_io_kwargs": "leave it out; the model's own processor decides",
    "mm_processor_kwargs": "leave it out; the model's own processor decides",
    "modalities": "ask for text",
    "prompt_embeds": "send a text or token ids",
    "return_prompt_text": "use return_token_ids and /detokenize",
    "separate_reasoning": "put reasoning_content and content together yourself",
    "suffix": "write the prompt with the model's own tokens for filling in the middle",
    "vllm_xargs": "leave it out; the extensions that read it do not exist here",
    "watermarking": "leave it out",
    # on /v1/responses
    "background": "wait for the response, or stream it",
    "best_of": "send several requests",
    "early_stopping": "use /v1/chat/completions with use_beam_search",
    "length_penalty": "use /v1/chat/completions with use_beam_search",
    "n": "send several requests",
    "prompt_logprobs": "use /v1/chat/completions",
    "return_token_ids": "use /v1/chat/completions",
    "return_tokens_as_token_ids": "use /v1/chat/completions",
    "web_search_options": "define a tool that searches",
    "messages": "use /v1/chat/completions",
    "tools": "use /v1/chat/completions",
    "prompt": "use messages, or /v1/completions",
    "top_logprobs": "use logprobs: N",
}
_OF_CHATS = ("function_call", "functions", "reasoning", *REASONING)
COMMON = {name: () for name in _INSTEAD if name not in _OF_CHATS} | COMMON
COMPLETION = COMMON | {
    "messages": (),
    "tools": ([],),
    "suffix": ("",),
    "top_logprobs": (),
}
CHAT = COMMON | {
    **REASONING,
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prompt": (),
    "reasoning": ({},),
    "return_prompt_text": (False,),
    "suffix": ("",),
    "web_search_options": (),
}
# route name -> table
TABLES = {"completions": COMPLETION, "chat": CHAT}
MESSAGE = {"function_call": ()}
MESSAGE_HINTS = {"function_call": "use tool_calls"}
# fields of embeddings, scores and classes
POOLING: dict[str, tuple] = {
    "activation": (True,),
    "additional_data": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "embed_dtype": ("float32",),
    "embedding_type": ("float",),
    "embedding_types": (),
    "endianness": ("native", "little"),
    "images": ([],),
    "input_type": (),
    "late_chunking": (False,),
    "mm_processor_kwargs": ({},),
    "normalized": (),
    "output_dimension": (),
    "output_dtype": ("float",),
    "softmax": (True,),
    "task": (),
    "truncation_side": ("right",),
    "use_activation": (True,),
}
POOLING_HINTS = {
    "activation": "leave it out: scores are probabilities",
    "additional_data": "leave it out",
    "chat_template": "render the text and send it as input",
    "chat_template_kwargs": "render the text and send it as input",
    "embed_dtype": "use float32",
    "embedding_type": "use encoding_format, or embedding_types of /v2/embed",
    "embedding_types": "use encoding_format, or /v2/embed",
    "endianness": "use little",
    "images": "send texts",
    "input_type": "use prompt_name, or /v2/embed",
    "late_chunking": "use /pooling with task: token_embed, and average each chunk's vectors",
    "mm_processor_kwargs": "leave it out",
    "normalized": "use normalize",
    "output_dimension": "use dimensions",
    "output_dtype": "use embedding_types of /v2/embed",
    "softmax": "leave it out: scores are probabilities",
    "task": "use prompt_name, or the name of the task's adapter as model",
    "truncation_side": "cut the text yourself; the server keeps its start",
    "use_activation": "leave it out: scores are probabilities",
}
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
        raise ApiError(
            400,
            f"{prefix}{name} is not supported by this server;",
            f"{hints.get(name, 'leave it out')}.",
            prefix + name,
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
