"""Token sequences of `SamplingParams.bad_words`, as the engine takes them."""

from collections.abc import Callable
from dataclasses import replace

from qserve.params.sampling_params import SamplingParams
from qserve.text.tokenizer import Tokenizer


def with_bad_words(
    params: SamplingParams, get_tokenizer: Callable[[], Tokenizer]
) -> SamplingParams:
    """Return parameters with `bad_words_token_ids`. Raises TextError for invalid Unicode.

    Each word is encoded twice: as the start of a text, and after a space, which most tokenizers
    make part of its first token.
    """
    if not params.bad_words or params.bad_words_token_ids:
        return params
    tokenizer = get_tokenizer()
    sequences = [
        tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
        for word in params.bad_words
        for space in ("", " ")
    ]
    return replace(params, bad_words_token_ids=tuple(dict.fromkeys(filter(None, sequences))))
