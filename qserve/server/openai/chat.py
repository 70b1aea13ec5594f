"""POST /v1/chat/completions: the reply and the route."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from qserve.engine.token_event import TokenLogprobs
from qserve.output_parsing.output_parser import Message, OutputParser
from qserve.server.http.route_list import RouteList
from qserve.server.openai.answer import answer
from qserve.server.openai.chat_message import delta_fields, message_fields
from qserve.server.openai.generation import Output
from qserve.server.openai.logprobs import Token, chat_logprobs
from qserve.server.openai.replies import Reply
from qserve.text.text_stream import TextDelta

routes = RouteList()


class ChatReply(Reply):
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def _whole(self, index: int, output: Output) -> dict:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        parsing = self.job.parsing
        if parsing is None:
            return {"message": message}
        is_cut = output.finish_reason == "length"
        found = Message.of(OutputParser(parsing).parse(output.text, is_cut=is_cut))
        fields = message_fields(found, parsing)
        if self._omits_reasoning:
            fields.pop("reasoning_content", None)
        return {"message": message | fields}

    @property
    def _omits_reasoning(self) -> bool:
        return self.job.repeated["omits_reasoning"]

    def _opening(self, index: int) -> dict | None:
        parsing = self.job.parsing
        # As in a whole reply, content is null if the message must be a call.
        is_call = parsing is not None and parsing.is_call
        return {"delta": {"role": "assistant", "content": None if is_call else ""}}

    def _delta(self, index: int, delta: TextDelta) -> dict:
        if self.job.parsing is not None:
            return {"delta": self._parsed(index, delta)}
        is_bare_end = not delta.text and delta.finish_reason is not None
        return {"delta": {} if is_bare_end else {"content": delta.text}}

    def _parsed(self, index: int, delta: TextDelta) -> dict:
        """Return the fields of a delta for parsed text."""
        if index not in self.parsers:
            self.parsers[index] = OutputParser(self.job.parsing)
        pieces = self.parsers[index].push(delta.text)
        if delta.finish_reason is not None:
            is_cut = delta.finish_reason == "length"
            pieces += self.parsers[index].finish(is_cut=is_cut)
        fields = delta_fields(pieces, self.job.parsing)
        if self._omits_reasoning:
            fields.pop("reasoning_content", None)
        if "tool_calls" in fields:
            self.called.add(index)
        # No fields while the parser has not decided what the text is; "" would count as content.
        return fields

    def _ending(self, fields: dict, index: int, part: Output | TextDelta) -> dict:
        ending = super()._ending(fields, index, part)
        calls = index in self.called or fields.get("message", {}).get("tool_calls")
        if calls and part.finish_reason == "stop":
            return ending | {"finish_reason": "tool_calls"}
        return ending

    def _of_prompt(self, outputs: list[Output]) -> dict:
        of_prompt = self._prompt_logprobs(0, outputs[0])
        found = {} if of_prompt is None else {"prompt_logprobs": of_prompt}
        if self.job.returns_token_ids:  # as in vLLM; completions have them in each choice
            found["prompt_token_ids"] = self.job.prompt_of(0)
        return found

    def _of_chunk(self, choice: dict) -> dict:
        prompt = choice.get("prompt_token_ids")
        return {} if prompt is None else {"prompt_token_ids": prompt}

    def _format(
        self, index: int, tokens: list[Token], of_prompt: Sequence[TokenLogprobs | None] | None
    ) -> dict:
        return chat_logprobs(self.tokenizer, tokens, as_ids=self.job.tokens_as_ids)


@routes.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await answer(request, "chat", ChatReply)
