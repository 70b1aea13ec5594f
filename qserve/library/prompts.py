"""Prompts of the Python API: a text, token ids, or one of vLLM's dicts. Loads no torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from formats.errors import InputError
from qserve.library.media_prompts import MEDIA, media_of
from qserve.lora.request import LoRARequest
from qserve.params.handling import Handling
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
            raise InputError("prompt", f"expected a dict with prompt or prompt_token_ids: {found}")
        if not takes_media and any(media_of(prompt)):
            raise InputError(MEDIA, "is not supported by this call", "use generate or LLM.chat")
        text = prompt.get("prompt")
        if "prompt_token_ids" in given:
            return text, list(prompt["prompt_token_ids"])
        prompt = text
    if isinstance(prompt, str):
        return prompt, get_tokenizer().encode(prompt)
    return None, list(prompt)


def handling_of(
    prompt: PromptType,
    priority: int,
    lora: LoRARequest | None = None,
    media: "tuple[MediaItem, ...]" = (),
) -> Handling:
    """Return the Handling of a prompt. Raises InputError."""
    salt = prompt.get(CACHE_SALT) if isinstance(prompt, Mapping) else None
    return Handling(priority=priority, cache_salt=salt or "", lora=lora, media=media)


def as_batch(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """Return a list of prompts: [prompts] if `prompts` is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts
