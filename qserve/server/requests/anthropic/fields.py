"""Request models of POST /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from qserve.server.requests.anthropic.blocks import (
    Block,
    TextBlock,
    as_blocks,
    check_blocks_of_role,
)
from qserve.server.requests.anthropic.tools import MessagesTool, ToolChoice
from qserve.server.requests.field_errors import field_error
from qserve.server.requests.protocol import (
    MAX_MESSAGES,
    MAX_PARTS,
    ONE_ERROR,
    Body,
    Effort,
    at_most,
)
from qserve.server.requests.tool_fields import MAX_TOOLS

MIN_BUDGET = 1024  # minimum thinking tokens, as in Anthropic's API
OMITTED = "omitted"  # `display` of thinking blocks without text

SystemPrompt = Annotated[
    list[TextBlock] | None, ONE_ERROR, at_most(MAX_PARTS, "blocks"), BeforeValidator(as_blocks)
]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block], ONE_ERROR, at_most(MAX_PARTS, "blocks"), BeforeValidator(as_blocks)
    ]

    @model_validator(mode="after")
    def _check_blocks(self) -> "Turn":
        check_blocks_of_role(self.role, self.content)
        return self


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> "Thinking":
        budget = self.budget_tokens
        if self.type == "enabled" and (budget is None or budget < MIN_BUDGET):
            found = "none" if budget is None else budget
            raise field_error(
                f"budget_tokens: expected {MIN_BUDGET} or more, found {found}", "raise it"
            )
        return self


class Format(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, value: Any) -> Any:
        # pydantic's models have a method `schema`, so the field needs another name.
        if isinstance(value, dict) and "schema" in value:
            return {"schema_" if name == "schema" else name: value[name] for name in value}
        return value


class OutputConfig(Body):
    effort: Effort | None = None
    format: Format | None = None


class Metadata(Body):
    user_id: str | None = None


def _not_empty(value: str) -> str:
    if not value:
        raise field_error("expected a text that is not empty", "write one, or leave it out")
    return value


class CountTokensRequest(Body):
    """The body of POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[Turn], ONE_ERROR, at_most(MAX_MESSAGES, "messages")]
    system: SystemPrompt = None
    tools: Annotated[list[MessagesTool] | None, ONE_ERROR, at_most(MAX_TOOLS, "tools")] = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None  # older name of output_config.format

    @property
    def format(self) -> Format | None:
        found = None if self.output_config is None else self.output_config.format
        return self.output_format if found is None else found

    @property
    def effort(self) -> Effort | None:
        return None if self.output_config is None else self.output_config.effort


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: int  # 0: only compute and cache the prompt
    stop_sequences: Annotated[
        list[Annotated[str, AfterValidator(_not_empty)]] | None, ONE_ERROR
    ] = None  # the chat request checks number and length
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
