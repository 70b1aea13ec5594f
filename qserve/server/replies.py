"""The JSON of successful replies, whole and in stream chunks. Pure: objects in, dicts out."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from qserve.engine.request import TokenLogprobs
from qserve.server.generation import Output
from qserve.server.job import Job
from qserve.server.logprobs import chat_logprobs, completion_logprobs
from qserve.text import TextDelta, Tokenizer


def usage(num_prompt_tokens: int, num_completion_tokens: int, num_cached: int) -> dict:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def model_card(name: str, created: int, max_model_len: int) -> dict:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "qserve",
        "max_model_len": max_model_len,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What all chunks of one reply share; CompletionReply and ChatReply say what differs."""

    job: Job
    model: str
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))

    # characters that a choice's tokens made so far, where a stream tells of log probabilities
    offsets: dict[int, int] = field(default_factory=dict)

    whole_object = chunk_object = ""

    def whole(self, outputs: list[Output]) -> dict:
        """The reply that is not streamed."""
        choices = [
            {
                "index": index,
                **self._whole(index, output),
                "logprobs": self._logprobs(index, output),
                **_ending(output),
            }
            for index, output in enumerate(outputs)
        ]
        num_tokens = sum(output.num_tokens for output in outputs)
        num_cached = {index: output.num_cached for index, output in enumerate(outputs)}
        return self._envelope(self.whole_object, choices) | {
            "usage": usage(self.job.num_prompt_tokens, num_tokens, self.job.num_cached(num_cached))
        }

    def opening(self, index: int) -> dict | None:
        """The chunk before a choice's first text, if it has one."""
        fields = self._opening(index)
        return fields and self._chunk(index, fields, TextDelta(text="", token_ids=()))

    def chunk(self, index: int, delta: TextDelta) -> dict:
        return self._chunk(index, self._delta(delta), delta)

    def usage_chunk(self, num_completion_tokens: int, num_cached: Mapping[int, int]) -> dict:
        """The chunk after all choices, for stream_options.include_usage.

        `num_cached`: the prompt tokens that each choice found in the cache.
        """
        counts = usage(
            self.job.num_prompt_tokens, num_completion_tokens, self.job.num_cached(num_cached)
        )
        return self._envelope(self.chunk_object, []) | {"usage": counts}

    def _chunk(self, index: int, fields: dict, delta: TextDelta) -> dict:
        logprobs = self._logprobs(index, delta)
        choice = {"index": index, **fields, "logprobs": logprobs, **_ending(delta)}
        chunk = self._envelope(self.chunk_object, [choice])
        return chunk | {"usage": None} if self.job.streams_usage else chunk

    def _logprobs(self, index: int, part: Output | TextDelta) -> dict | None:
        """OpenAI's log probabilities; None where nobody asked, and in a chunk without tokens."""
        is_empty_chunk = isinstance(part, TextDelta) and not part.logprobs
        if self.job.params[0].logprobs is None or is_empty_chunk:
            return None
        tokens = list(zip(part.token_ids, part.logprobs, strict=False))
        return self._format(index, tokens)

    def _envelope(self, kind: str, choices: list[dict]) -> dict:
        return {
            "id": self.job.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class CompletionReply(Reply):
    whole_object = chunk_object = "text_completion"

    def _whole(self, index: int, output: Output) -> dict:
        return {"text": self.job.echo(index) + output.text}

    def _opening(self, index: int) -> dict | None:
        echo = self.job.echo(index)
        return {"text": echo} if echo else None

    def _delta(self, delta: TextDelta) -> dict:
        return {"text": delta.text}

    def _format(self, index: int, tokens: list[tuple[int, TokenLogprobs]]) -> dict:
        offset = self.offsets.get(index, 0)
        formatted = completion_logprobs(self.tokenizer, tokens, offset)
        self.offsets[index] = offset + sum(map(len, formatted["tokens"]))
        return formatted


class ChatReply(Reply):
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def _whole(self, index: int, output: Output) -> dict:
        return {"message": {"role": "assistant", "content": output.text}}

    def _opening(self, index: int) -> dict | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def _delta(self, delta: TextDelta) -> dict:
        return {"delta": {"content": delta.text} if delta.text else {}}

    def _format(self, index: int, tokens: list[tuple[int, TokenLogprobs]]) -> dict:
        return chat_logprobs(self.tokenizer, tokens)


def _ending(part: Output | TextDelta) -> dict:
    return {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
