"""The tokens of a text whose vector is asked for. Loads no torch."""

from qserve.pooling_config import PoolingConfig
from qserve.text import Tokenizer


def input_tokens(
    config: PoolingConfig,
    tokenizer: Tokenizer,
    text: str,
    prompt_name: str | None = None,
    *,
    add_special_tokens: bool = True,
) -> list[int]:
    """As sentence-transformers makes them, which renders some models' texts as chats.

    `prompt_name`: of the model's texts that go before; None: the default. Raises InputError.
    """
    before = config.prompt(prompt_name)
    if not config.is_chat:
        return tokenizer.encode(before + text, add_special_tokens)
    messages = [{"role": "user", "content": text}]
    if before:
        messages.insert(0, {"role": "system", "content": before})
    return tokenizer.encode_chat(messages, add_generation_prompt=False)
