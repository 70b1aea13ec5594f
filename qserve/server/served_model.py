"""ServedModel: what is needed of the model to make a job of a request's body."""

from dataclasses import dataclass

from qserve.server.errors import ApiError
from qserve.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    names: tuple[str, ...]  # that clients may use
    tokenizer: Tokenizer
    defaults: dict[str, float]  # sampling fields that the model's folder sets
    max_model_len: int
    vocab_size: int
    chat_special_tokens: bool = False  # messages may make control tokens
    auto_tool_parser: str | None = None  # one of TOOL_PARSERS, where models may choose to call
    reasoning_parser: str | None = None  # one of REASONING_PARSERS

    def check_name(self, name: str | None) -> None:
        """Raise ApiError(404) for a model that is not served; no name means the one that is."""
        if name is not None and name not in self.names:
            known = ", ".join(map(repr, self.names))
            raise ApiError(
                404,
                f"The model {name[:200]!r} does not exist; this server has {known}.",
                "model",
            )
