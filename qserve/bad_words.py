"""Bad words as the engine takes them: the token sequences of `SamplingParams.bad_words`."""

from collections.abc import Callable
from dataclasses import replace

from qserve.sampling_params import SamplingParams
from qserve.text import Tokenizer


def with_bad_words(
    params: SamplingParams, get_tokenizer: Callable[[], Tokenizer]
) -> SamplingParams:
    """The parameters with `bad_words_token_ids`. Raises TextError for what is not Unicode.

    Each word stands for itself at the start of a text and behind a space, which most tokenizers
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
