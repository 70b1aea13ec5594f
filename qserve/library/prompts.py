"""Prompts of the Python API: a text, token ids, or one of vLLM's dicts. Loads no torch."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from formats.errors import InputError
from qserve.library.media_prompts import MEDIA, media_of
from qserve.lora.request import LoRARequest
from qserve.params.request_options import RequestOptions
from qserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from qserve.multimodal.media import MediaItem


class TextPrompt(TypedDict):
    """A prompt as text. Prompts share KV pages only if their `cache_salt` is the same."""

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]  # {"image": PIL images, "video": frames}
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. The optional text `prompt` is only repeated in the outputs."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt
PROMPT_KEYS = ("prompt", "prompt_token_ids")
CACHE_SALT = "cache_salt"
MAX_TOKEN_ID = 2**31 - 1  # tokenizers cannot decode larger ids


def read_prompt(
    prompt: PromptType, get_tokenizer: Callable[[], Tokenizer], *, takes_media: bool = False
) -> tuple[str | None, list[int]]:
    """Return the text (None if the prompt has none) and the token ids of a prompt.

    Raises InputError for a malformed prompt, and for media unless `takes_media`.
    """
    if isinstance(prompt, Mapping):
        given = [key for key in PROMPT_KEYS if prompt.get(key) is not None]
        unknown = prompt.keys() - {*PROMPT_KEYS, CACHE_SALT, MEDIA}
        if unknown or not given:
            found = ", ".join(sorted(map(str, prompt)))
            raise InputError(
                "prompt",
                f"expected a dict with prompt or prompt_token_ids: {found}",
                'give {"prompt": "..."} or {"prompt_token_ids": [...]}',
            )
        if not takes_media and any(media_of(prompt)):
            raise InputError(MEDIA, "is not supported by this call", "use generate or LLM.chat")
        text = prompt.get("prompt")
        if "prompt_token_ids" in given:
            return text, token_list(prompt["prompt_token_ids"])
        prompt = text
    if isinstance(prompt, str):
        return prompt, get_tokenizer().encode(prompt)
    return None, token_list(prompt, "a text or a list of token ids")


def token_list(ids: Iterable[int], expected: str = "a list of token ids") -> list[int]:
    """Return token ids as a list; also those of an array or a tensor. Raises InputError.

    `expected`: what the caller takes, for the error.
    """
    try:
        if isinstance(ids, str | bytes | bytearray):
            raise TypeError
        found = [*map(operator.index, ids)]
    except TypeError:
        problem = f"expected {expected}, found {ids!r:.80}"
        raise InputError(
            "prompt", problem, "pass it as text, or encode it with the tokenizer"
        ) from None
    if found and not 0 <= min(found) <= max(found) <= MAX_TOKEN_ID:
        wrong = next(each for each in found if not 0 <= each <= MAX_TOKEN_ID)
        raise InputError(
            "prompt",
            f"token id {wrong} is not in the vocabulary",
            "encode the text with this model's tokenizer",
        )
    return found


def request_options_of(
    prompt: PromptType,
    priority: int,
    lora: LoRARequest | None = None,
    media: "tuple[MediaItem, ...]" = (),
) -> RequestOptions:
    """Return the RequestOptions of a prompt. Raises InputError."""
    salt = prompt.get(CACHE_SALT) if isinstance(prompt, Mapping) else None
    return RequestOptions(priority=priority, cache_salt=salt or "", lora=lora, media=media)


def as_batch(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """Return a list of prompts: [prompts] if `prompts` is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    try:
        found = [prompts] if isinstance(prompts, bytes | bytearray) else list(prompts)
    except TypeError:
        problem = f"expected a prompt or a list of prompts, found {prompts!r:.80}"
        raise InputError("prompts", problem, "put the prompts in a list") from None
    return [found] if found and isinstance(found[0], Integral) else found


def as_conversations(
    messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
) -> Sequence[Sequence[Mapping[str, Any]]]:
    """Return a list of conversations: [messages] if `messages` is one. Raises InputError."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    found = [messages] if is_list and messages and isinstance(messages[0], Mapping) else messages
    for each in found if is_list else [messages]:
        is_one = isinstance(each, Sequence) and not isinstance(each, str)
        if not is_one or not all(isinstance(message, Mapping) for message in each):
            problem = f"expected a list of messages, or a list of such lists, found {each!r:.80}"
            raise InputError("messages", problem, 'such as [{"role": "user", "content": "Hi"}]')
    return found
