"""ServedModel: facts about the served model that are needed to prepare a job."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from qserve.lora.request import LoRARequest
from qserve.multimodal.reader import MediaReader
from qserve.server.http.errors import ApiError
from qserve.text.tokenizer import Tokenizer

TEXT_ONLY = "reads text only. Remove the image, or use a vision-language model"
# media type that a model may not take -> what to send instead
OTHER_FORMS = {"video": "frames of it as images"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    names: tuple[str, ...]  # model names that requests may use
    tokenizer: Tokenizer
    defaults: dict[str, float]  # sampling fields from generation_config.json
    max_model_len: int
    vocab_size: int
    chat_special_tokens: bool = False  # --chat-special-tokens
    auto_tool_parser: str | None = None  # one of TOOL_PARSERS, for tool_choice: auto
    reasoning_parser: str | None = None  # one of REASONING_PARSERS
    structured_output_strict: bool = False  # refuse schemas that cannot be enforced
    adapters: Mapping[str, LoRARequest] = field(default_factory=dict)  # by name
    media: MediaReader | None = None  # None: images and videos are refused
    without_media: str = TEXT_ONLY  # error text if media are refused, after the model's name

    def check_name(self, name: str | None) -> None:
        """Raise ApiError(404) unless a model or adapter has this name. None: the served model."""
        if name is not None and name not in self.names and name not in self.adapters:
            known = ", ".join(map(repr, (*self.names, *self.adapters)))
            raise ApiError(
                404,
                f"The model {name[:200]!r} does not exist; this server serves {known}.",
                "Use one of these names.",
                "model",
            )

    def check_takes(self, param: str, kind: str = "image") -> None:
        """Raise ApiError(400) if the model does not take this media type. `param`: its field."""
        if self.media is None:
            why = self.without_media.replace(TEXT_ONLY, TEXT_ONLY.replace("image", kind))
            raise ApiError.relayed(400, f"{param}: the model {self.names[0]!r} {why}.", param)
        if kind not in self.media.kinds:
            raise ApiError(
                400,
                f"{param}: the model {self.names[0]!r} takes no {kind}.",
                f"Send {OTHER_FORMS[kind]}.",
                param,
            )

    def adapter(self, name: str | None) -> LoRARequest | None:
        """Return the adapter with this name; None: the name means the base model."""
        return None if name is None else self.adapters.get(name)
