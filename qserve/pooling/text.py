"""Tokenization of texts to embed. Loads no torch."""

from qserve.pooling.config import PoolingConfig
from qserve.text.tokenizer import Tokenizer


def input_tokens(
    config: PoolingConfig,
    tokenizer: Tokenizer,
    text: str,
    prompt_name: str | None = None,
    *,
    add_special_tokens: bool = True,
) -> list[int]:
    """Tokenize a text as sentence-transformers does: for some models, by the chat template.

    `prompt_name`: prompt of the model to prepend; None: the default prompt. Raises InputError.
    """
    before = config.prompt(prompt_name)
    if not config.is_chat:
        return tokenizer.encode(before + text, add_special_tokens)
    messages = [{"role": "user", "content": text}]
    if before:
        messages.insert(0, {"role": "system", "content": before})
    return tokenizer.encode_chat(messages, add_generation_prompt=False)
