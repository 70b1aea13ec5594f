"""Log probabilities in the formats of chat completions, of completions, and of vLLM."""

from collections.abc import Iterable, Sequence

from qserve.engine.token_event import TokenLogprobs
from qserve.text.text_stream import IncrementalDetokenizer
from qserve.text.tokenizer import Tokenizer

LOWEST = -9999.0  # vLLM's substitute for minus infinity, which JSON lacks

Token = tuple[int, TokenLogprobs | None]  # None: the first token of a prompt


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[Token], *, as_ids: bool = False) -> dict:
    """Return the `logprobs` of a chat choice. `as_ids`: name tokens token_id:N.

    A token that is part of a character is named by its escaped bytes, as OpenAI does.
    """

    def entry(token: int, logprob: float) -> dict:
        data = tokenizer.token_bytes(token)
        name = by_id(token) if as_ids else data.decode(errors="backslashreplace")
        return {"token": name, "logprob": _finite(logprob), "bytes": list(data)}

    content = [
        entry(token, found.logprob)
        | {"top_logprobs": [entry(other, logprob) for other, logprob in _alternatives(found)]}
        for token, found in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[Token],
    offsets: Sequence[int],
    *,
    as_ids: bool = False,
) -> dict:
    """Return the `logprobs` of a completion choice.

    offsets: character offset of each token in the text
    as_ids: name all tokens token_id:N

    The dict of a token's alternatives has token names as keys, and always includes the token. A
    token that is part of a character is named by its bytes, as OpenAI does. If two tokens have the
    same name, the sampled token keeps the name, otherwise the likelier one; the other token is
    named token_id:N.
    """

    def name_of(token: int) -> str:
        return by_id(token) if as_ids else _completion_name(tokenizer, token)

    names, tops = [], []
    for token, found in tokens:
        name = name_of(token)
        names.append(name)
        if found is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for other, value in _alternatives(found):
            if other == token:
                top[name] = _finite(found.logprob)
                continue
            key = name_of(other)
            top[by_id(other) if key in top or key == name else key] = _finite(value)
        top.setdefault(name, _finite(found.logprob))
        tops.append(top)
    return {
        "tokens": names,
        "token_logprobs": [found and _finite(found.logprob) for _, found in tokens],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], found: Sequence[TokenLogprobs | None], most: int
) -> list[dict | None]:
    """Return vLLM's `prompt_logprobs`: per prompt token a dict with the token and alternatives."""
    entries: list[dict | None] = []
    for token, each in zip(prompt, found, strict=True):
        if each is None:
            entries.append(None)
            continue
        shown = {token: (each.logprob, each.rank)}
        for rank, (other, value) in enumerate(_alternatives(cut(each, most)), start=1):
            shown.setdefault(other, (value, rank))
        entry = {
            str(other): {
                "logprob": _finite(value),
                "rank": rank,
                "decoded_token": tokenizer.token_text(other),
            }
            for other, (value, rank) in shown.items()
        }
        entries.append(entry)
    return entries


def cut(found: TokenLogprobs | None, most: int) -> TokenLogprobs | None:
    """Return `found` with at most `most` alternatives."""
    if found is None:
        return None
    return found._replace(
        top_tokens=found.top_tokens[:most], top_logprobs=found.top_logprobs[:most]
    )


def _alternatives(found: TokenLogprobs) -> Iterable[tuple[int, float]]:
    return zip(found.top_tokens, found.top_logprobs, strict=True)


def by_id(token: int) -> str:
    """Return a token's name in vLLM's form token_id:N."""
    return f"token_id:{token}"


def _completion_name(tokenizer: Tokenizer, token: int) -> str:
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"bytes:{data.decode(errors='backslashreplace')}"


def _finite(logprob: float) -> float:
    return LOWEST if logprob < LOWEST else logprob


class TextOffsets:
    """Computes the character offset of each token in the text of an output or an echoed prompt.

    Several tokens may form one character. They have the same offset, the character's.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        echo: str | None = None,
    ) -> None:
        """`echo`: text of the tokens. It decides which special tokens have text: those of a
        prompt's text do, a BOS token that the tokenizer has added does not.
        """
        skips = skip_special_tokens or echo is not None
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt, skips)
        self._tokenizer, self._echo = tokenizer, echo
        self._num_chars = 0

    def take(self, token: int) -> int:
        """Add the next token, and return the number of characters before it."""
        before = self._num_chars
        if self._echo is not None and token in self._tokenizer.special_token_ids:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            self._num_chars += len(text) if self._echo.startswith(text, before) else 0
        else:
            self._num_chars += len(self._detokenizer.push((token,)))
        return before
