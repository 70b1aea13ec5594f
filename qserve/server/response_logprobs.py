"""Log probabilities of a response: which tokens a message's text is made of, in OpenAI's forms."""

from collections.abc import Iterable, Iterator, Sequence

from qserve.output_parsing.output_parser import OutputParser
from qserve.output_parsing.pieces import CONTENT, Piece
from qserve.server.logprobs import Token, chat_logprobs
from qserve.text import Tokenizer

TokensOfPiece = tuple[Piece, Sequence[Token]]


class TokenPieces:
    """The pieces of an output as its text comes, those of content with their tokens.

    Tokens whose text a parser holds back wait for the piece that it becomes. Those of reasoning,
    calls and marks belong to no message.
    """

    def __init__(self, tokenizer: Tokenizer, parser: OutputParser | None) -> None:
        self._tokenizer, self._parser = tokenizer, parser
        self._waiting: list[Token] = []

    def push(self, text: str, tokens: Iterable[Token], *, is_end: bool) -> Iterator[TokensOfPiece]:
        """What is known with this text, which these tokens brought; `is_end`: it is the last."""
        self._waiting += tokens
        if self._parser is None:
            tokens, self._waiting = self._waiting, []
            yield Piece(CONTENT, text), tokens
            return
        pieces = self._parser.push(text)
        if is_end:
            pieces += self._parser.finish()
        for piece in pieces:
            yield piece, self._take(piece.text) if piece.kind == CONTENT else ()
        if pieces and pieces[-1].kind != CONTENT:
            self._waiting = []

    def _take(self, content: str) -> list[Token]:
        """The waiting tokens that this text lies in; those before it are marks."""
        texts = [self._tokenizer.token_text(token) for token, _ in self._waiting]
        start = max(0, "".join(texts).find(content))
        end, place, taken, num_done = start + len(content), 0, [], 0
        for token, text in zip(self._waiting, texts, strict=True):
            if place >= end:
                break
            num_done += 1
            if place + len(text) > start:
                taken.append(token)
            place += len(text)
        del self._waiting[:num_done]
        return taken


def entries(tokenizer: Tokenizer, tokens: Sequence[Token]) -> list[dict]:
    """As a message's part has them: with the bytes of each text, none of a part of a character."""
    found = chat_logprobs(tokenizer, tokens)["content"]
    for entry in (each for told in found for each in (told, *told["top_logprobs"])):
        entry["bytes"] = entry["bytes"] or []
    return found


def without_bytes(found: Sequence[dict]) -> list[dict]:
    """As the events of a stream have them."""
    return [
        {
            "token": told["token"],
            "logprob": told["logprob"],
            "top_logprobs": [
                {"token": each["token"], "logprob": each["logprob"]}
                for each in told["top_logprobs"]
            ],
        }
        for told in found
    ]
