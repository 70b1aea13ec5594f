"""POST /v1/completions: the reply and the route."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from qserve.engine.token_event import TokenLogprobs
from qserve.server.http.route_list import RouteList
from qserve.server.openai.answer import answer
from qserve.server.openai.generation import Output
from qserve.server.openai.logprobs import TextOffsets, Token, completion_logprobs, cut
from qserve.server.openai.replies import Reply
from qserve.text.text_stream import TextDelta

routes = RouteList()


class CompletionReply(Reply):
    whole_object = chunk_object = "text_completion"

    def _whole(self, index: int, output: Output) -> dict:
        return {"text": self.job.echo(index) + output.text}

    def _opening(self, index: int) -> dict | None:
        echo = self.job.echo(index)
        return {"text": echo} if echo else None

    def _delta(self, index: int, delta: TextDelta) -> dict:
        return {"text": delta.text}

    def _of_choice_prompt(self, index: int, output: Output) -> dict:
        of_prompt = self._prompt_logprobs(index, output)
        return {} if of_prompt is None else {"prompt_logprobs": of_prompt}

    def _format(
        self, index: int, tokens: list[Token], of_prompt: Sequence[TokenLogprobs | None] | None
    ) -> dict:
        # The parameters used here are equal for all choices.
        prompt, params = self.job.prompt_of(index), self.job.params[0]
        if index not in self.offsets:
            skips = params.skip_special_tokens
            self.offsets[index] = TextOffsets(self.tokenizer, prompt, skip_special_tokens=skips)
        echo = self.job.echo(index)
        start = len(echo)
        offsets = [start + self.offsets[index].take(token) for token, _ in tokens]
        if of_prompt is not None:
            self.has_echoed.add(index)
            before = TextOffsets(self.tokenizer, echo=echo)
            echoed = [
                (token, cut(found, params.logprobs))
                for token, found in zip(prompt, of_prompt, strict=True)
            ]
            offsets = [before.take(token) for token in prompt] + offsets
            tokens = echoed + tokens
        as_ids = self.job.tokens_as_ids
        return completion_logprobs(self.tokenizer, tokens, offsets, as_ids=as_ids)


@routes.post("/v1/completions")
async def completions(request: Request) -> Response:
    return await answer(request, "completions", CompletionReply)
