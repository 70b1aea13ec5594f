"""ServedModel: what is needed of the model to make a job of a request's body."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from qserve.lora.request import LoRARequest
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
    adapters: Mapping[str, LoRARequest] = field(default_factory=dict)  # by the names they go by

    def check_name(self, name: str | None) -> None:
        """Raise ApiError(404) for a model that is not served; no name means the one that is."""
        if name is not None and name not in self.names and name not in self.adapters:
            known = ", ".join(map(repr, (*self.names, *self.adapters)))
            raise ApiError(
                404,
                f"The model {name[:200]!r} does not exist; this server has {known}.",
                "model",
            )

    def adapter(self, name: str | None) -> LoRARequest | None:
        """The adapter that goes by a name; None: it is the model's."""
        return None if name is None else self.adapters.get(name)
