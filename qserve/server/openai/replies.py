"""Base class of completion and chat replies, whole and in stream chunks; token counts."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from qserve.engine.token_event import RequestFacts, TokenEvent
from qserve.output_parsing.output_parser import OutputParser, ParseSettings
from qserve.output_parsing.reasoning import HarmonyTokens, ReasoningTokens
from qserve.server.openai.generation import Output
from qserve.server.openai.logprobs import (
    TextOffsets,
    prompt_logprobs,
)
from qserve.server.requests.job import Job
from qserve.text.text_stream import TextDelta
from qserve.text.tokenizer import Tokenizer


def usage(
    num_prompt_tokens: int,
    num_completion_tokens: int,
    num_cached: int,
    facts: Collection[RequestFacts] = (),
    num_reasoning: int | None = None,
) -> dict:
    """Return OpenAI's usage object.

    facts: one per choice; they have the numbers of accepted and rejected draft tokens
    num_reasoning: reasoning tokens; None: the output is not parsed for reasoning
    """
    accepted = sum(each.num_accepted for each in facts)
    rejected = sum(each.num_rejected for each in facts)
    found = {}
    if num_reasoning is not None:
        found["reasoning_tokens"] = num_reasoning
    if accepted or rejected:
        found |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    details = {"completion_tokens_details": found} if found else {}
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        **details,
    }


@dataclass(slots=True, kw_only=True)
class Counts:
    """Token counts of a reply so far, over all choices."""

    parsing: ParseSettings | None = None
    num_tokens: int = 0  # generated tokens
    facts: dict[int, RequestFacts] = field(default_factory=dict)  # by choice index
    reasoning: dict[int, ReasoningTokens | HarmonyTokens | None] = field(default_factory=dict)

    @property
    def num_reasoning(self) -> int | None:
        """Number of reasoning tokens; None: the output is not parsed for reasoning."""
        if self.parsing is None or self.parsing.reasoning_parser is None:
            return None
        return sum(each.count for each in self.reasoning.values() if each is not None)

    def add_reasoning(self, index: int, text: str, num_tokens: int) -> None:
        """Count the reasoning tokens in a piece of a choice's text, which has `num_tokens`."""
        if self.parsing is None:
            return
        if index not in self.reasoning:
            self.reasoning[index] = self.parsing.reasoning_tokens()
        if (counter := self.reasoning[index]) is not None:
            counter.add(text, num_tokens)

    def add(self, index: int, delta: TextDelta) -> None:
        num_tokens = len(delta.event.token_ids)
        self.add_reasoning(index, delta.text, num_tokens)
        self.num_tokens += num_tokens
        self.facts[index] = delta.event.facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Base of CompletionReply and ChatReply: the state of one reply, and the common fields."""

    job: Job
    model: str
    tokenizer: Tokenizer
    fingerprint: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    # choice index -> text offsets, if log probabilities are requested
    offsets: dict[int, TextOffsets] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)  # choices with at least one chunk sent
    parsers: dict[int, OutputParser] = field(default_factory=dict)  # by index of streamed choices
    called: set[int] = field(default_factory=set)  # streamed choices with tool calls
    has_echoed: set[int] = field(default_factory=set)  # choices whose prompt logprobs were sent

    whole_object = chunk_object = ""

    def whole(self, outputs: list[Output]) -> dict:
        """Return the whole reply."""
        choices = [
            {
                "index": index,
                **(fields := self._whole(index, output)),
                "logprobs": self._logprobs(index, output),
                **self._ending(fields, index, output),
                **self._token_ids(index, output.token_ids, opens=True),
                **self._of_choice_prompt(index, output),
            }
            for index, output in enumerate(outputs)
        ]
        counts = Counts(
            parsing=self.job.parsing,
            num_tokens=sum(len(output.token_ids) for output in outputs),
            facts={index: output.facts for index, output in enumerate(outputs)},
        )
        for index, output in enumerate(outputs):
            for text, num_tokens in output.parts:
                counts.add_reasoning(index, text, num_tokens)
        reply = self._envelope(self.whole_object, choices) | {"usage": self._usage(counts)}
        return reply | self._of_prompt(outputs)

    def opening(self, index: int, first: TextDelta, so_far: Counts) -> dict | None:
        """Return the chunk before a choice's first text, if any. `first`: the first delta."""
        fields = self._opening(index)
        if not fields:
            return None
        event = first.event._replace(token_ids=(), logprobs=(), finish_reason=None)
        return self._chunk(index, fields, TextDelta(event=event, text=""), so_far)

    def chunk(self, index: int, delta: TextDelta, so_far: Counts) -> dict:
        return self._chunk(index, self._delta(index, delta), delta, so_far)

    def usage_chunk(self, counts: Counts) -> dict:
        """Return the last chunk, for stream_options.include_usage."""
        return self._envelope(self.chunk_object, []) | {"usage": self._usage(counts)}

    def _usage(self, counts: Counts) -> dict:
        num_cached = self.job.num_cached(counts.facts)
        facts = counts.facts.values()
        num_prompt = self.job.num_prompt_tokens
        return usage(num_prompt, counts.num_tokens, num_cached, facts, counts.num_reasoning)

    def _chunk(self, index: int, fields: dict, delta: TextDelta, so_far: Counts) -> dict:
        event = delta.event
        logprobs = self._logprobs(index, event)
        token_ids = self._token_ids(index, event.token_ids, opens=index not in self.opened)
        self.opened.add(index)
        choice = {
            "index": index,
            **fields,
            "logprobs": logprobs,
            **self._ending(fields, index, delta),
            **token_ids,
        }
        chunk = self._envelope(self.chunk_object, [choice]) | self._of_chunk(choice)
        if self.job.streams_usage_always:
            return chunk | {"usage": self._usage(so_far)}
        return chunk | {"usage": None} if self.job.streams_usage else chunk

    def _token_ids(self, index: int, token_ids: Sequence[int], *, opens: bool) -> dict:
        """Return a choice's token ids, if requested. The first chunk also has the prompt's ids."""
        if not self.job.returns_token_ids:
            return {}
        prompt = self.job.prompt_of(index)
        return {"token_ids": list(token_ids), "prompt_token_ids": prompt if opens else None}

    def _logprobs(self, index: int, part: Output | TokenEvent) -> dict | None:
        """Return OpenAI's log probabilities; None if not requested or in an empty chunk."""
        is_empty_chunk = isinstance(part, TokenEvent) and not part.logprobs
        of_prompt = None
        if self.job.echoed and index not in self.has_echoed:
            of_prompt = part.prompt_logprobs
        if self.job.params[0].logprobs is None or (is_empty_chunk and of_prompt is None):
            return None
        tokens = list(zip(part.token_ids, part.logprobs, strict=False))
        return self._format(index, tokens, of_prompt)

    def _prompt_logprobs(self, index: int, output: Output) -> list[dict | None] | None:
        """Return the `prompt_logprobs` of a choice; None: not requested."""
        most = self.job.prompt_logprobs
        if most is None or output.prompt_logprobs is None:
            return None
        prompt = self.job.prompt_of(index)
        return prompt_logprobs(self.tokenizer, prompt, output.prompt_logprobs, most)

    def _of_choice_prompt(self, index: int, output: Output) -> dict:
        """Return a choice's fields about its prompt."""
        return {}

    def _of_chunk(self, choice: dict) -> dict:
        """Return a chunk's fields besides its choice."""
        return {}

    def _of_prompt(self, outputs: list[Output]) -> dict:
        """Return the reply's fields about the prompt."""
        return {}

    def _ending(self, fields: dict, index: int, part: Output | TextDelta) -> dict:
        """Return a choice's finish_reason and similar fields. `fields`: its other fields."""
        ending = {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
        if part.beam is None:
            return ending
        found = {"cumulative_logprob": part.beam.cumulative_logprob, "score": part.beam.score}
        return ending | found

    def _envelope(self, kind: str, choices: list[dict]) -> dict:
        return {
            "id": self.job.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
