"""The reply of POST /v1/responses: OpenAI's response object, whole and as a stream of events."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from qserve.server.generation import Deltas, Output
from qserve.server.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseReply:
    """What the object and all events of one reply share."""

    job: Job
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    prefix = "resp"

    def whole(self, outputs: list[Output]) -> dict:
        """The reply that is not streamed."""
        (output,) = outputs
        return self._response(output)

    async def events(self, deltas: Deltas) -> AsyncGenerator[dict, None]:
        """The stream's events; `type` names each."""
        output, number = Output(), 0

        def event(kind: str, **fields: Any) -> dict:
            nonlocal number
            number += 1
            return {"type": f"response.{kind}", "sequence_number": number - 1, **fields}

        place = {"output_index": 0, "content_index": 0, "item_id": self._item_id}
        opening = (
            event("created", response=self._response(None)),
            event("in_progress", response=self._response(None)),
            event("output_item.added", output_index=0, item=self._item(None)),
            event("content_part.added", **place, part=_part("")),
        )
        async for _, delta in deltas:
            for each in opening:
                yield each
            opening = ()
            output.add(delta)
            yield event("output_text.delta", **place, delta=delta.text, logprobs=[])
        yield event("output_text.done", **place, text=output.text, logprobs=[])
        yield event("content_part.done", **place, part=_part(output.text))
        yield event("output_item.done", output_index=0, item=self._item(output))
        yield event(_status(output), response=self._response(output))

    @property
    def _item_id(self) -> str:
        return self.job.request_id.replace("resp-", "msg-", 1)

    def _item(self, output: Output | None) -> dict:
        return {
            "id": self._item_id,
            "type": "message",
            "status": _status(output),
            "role": "assistant",
            "content": [] if output is None else [_part(output.text)],
        }

    def _response(self, output: Output | None) -> dict:
        """The response object; without an output, as it is before the first token."""
        (params,) = self.job.params
        status = _status(output)
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.job.request_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": reason,
            "model": self.model,
            "output": [] if output is None else [self._item(output)],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if output is None else self._usage(output),
            **self.job.repeated,
        }

    def _usage(self, output: Output) -> dict:
        num_prompt = self.job.num_prompt_tokens
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": output.num_cached},
            "output_tokens": output.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + output.num_tokens,
        }


def _status(output: Output | None) -> str:
    if output is None:
        return "in_progress"
    return "incomplete" if output.finish_reason == "length" else "completed"


def _part(text: str) -> dict:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
