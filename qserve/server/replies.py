"""The JSON of successful replies, whole and in stream chunks. Pure: objects in, dicts out."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from qserve.engine.request import TokenLogprobs
from qserve.output_parsing.output_parser import Message, OutputParser, ParseSettings
from qserve.output_parsing.reasoning import ReasoningTokens
from qserve.server.chat_message import delta_fields, message_fields
from qserve.server.generation import Output
from qserve.server.job import Job
from qserve.server.logprobs import (
    Token,
    chat_logprobs,
    completion_logprobs,
    cut,
    prompt_logprobs,
)
from qserve.server.text_offsets import TextOffsets
from qserve.text import TextDelta, Tokenizer


def usage(
    num_prompt_tokens: int,
    num_completion_tokens: int,
    num_cached: int,
    drafts: Collection[tuple[int, int]] = (),
    num_reasoning: int | None = None,
) -> dict:
    """`drafts`: of each choice, those that became output, and those that did not.

    `num_reasoning`: tokens of reasoning; None: it is not looked for.
    """
    accepted, rejected = (sum(each) for each in zip((0, 0), *drafts, strict=True))
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


def model_card(name: str, created: int, max_model_len: int, parent: str | None = None) -> dict:
    """`parent`: the model that an adapter of this name runs beside."""
    card = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "qserve",
        "max_model_len": max_model_len,
    }
    return card if parent is None else card | {"root": name, "parent": parent}


@dataclass(slots=True, kw_only=True)
class Counts:
    """The tokens of all choices so far."""

    parsing: ParseSettings | None = None
    num_tokens: int = 0  # generated
    cached: dict[int, int] = field(default_factory=dict)  # of the prompt, by the choice's index
    drafts: dict[int, tuple[int, int]] = field(default_factory=dict)  # accepted, rejected
    reasoning: dict[int, ReasoningTokens | None] = field(default_factory=dict)

    @property
    def num_reasoning(self) -> int | None:
        """None: no choice's reasoning is looked for."""
        if self.parsing is None or self.parsing.reasoning_parser is None:
            return None
        return sum(each.count for each in self.reasoning.values() if each is not None)

    def add_reasoning(self, index: int, text: str, num_tokens: int) -> None:
        """A part of a choice's text, and the tokens that brought it."""
        if self.parsing is None:
            return
        if index not in self.reasoning:
            self.reasoning[index] = self.parsing.reasoning_tokens()
        if (counter := self.reasoning[index]) is not None:
            counter.add(text, num_tokens)

    def add(self, index: int, delta: TextDelta) -> None:
        self.add_reasoning(index, delta.text, len(delta.token_ids))
        self.num_tokens += len(delta.token_ids)
        self.cached[index], self.drafts[index] = delta.num_cached, delta.drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What all chunks of one reply share; CompletionReply and ChatReply say what differs."""

    job: Job
    model: str
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))

    # of each choice, where log probabilities are told
    offsets: dict[int, TextOffsets] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)  # choices of which a chunk was sent
    parsers: dict[int, OutputParser] = field(default_factory=dict)  # of streamed choices
    called: set[int] = field(default_factory=set)  # streamed choices with calls of tools
    told: set[int] = field(default_factory=set)  # those whose prompt's log probabilities were

    prefix = whole_object = chunk_object = ""

    def whole(self, outputs: list[Output]) -> dict:
        """The reply that is not streamed."""
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
            num_tokens=sum(output.num_tokens for output in outputs),
            cached={index: output.num_cached for index, output in enumerate(outputs)},
            drafts={index: output.drafts for index, output in enumerate(outputs)},
        )
        for index, output in enumerate(outputs):
            for text, num_tokens in output.parts:
                counts.add_reasoning(index, text, num_tokens)
        reply = self._envelope(self.whole_object, choices) | {"usage": self._usage(counts)}
        return reply | self._of_prompt(outputs)

    def opening(self, index: int, first: TextDelta, so_far: Counts) -> dict | None:
        """The chunk before a choice's first text, if it has one. `first`: the delta behind it."""
        fields = self._opening(index)
        if not fields:
            return None
        empty = TextDelta(text="", token_ids=(), prompt_logprobs=first.prompt_logprobs)
        return self._chunk(index, fields, empty, so_far)

    def chunk(self, index: int, delta: TextDelta, so_far: Counts) -> dict:
        return self._chunk(index, self._delta(index, delta), delta, so_far)

    def usage_chunk(self, counts: Counts) -> dict:
        """The chunk after all choices, for stream_options.include_usage."""
        return self._envelope(self.chunk_object, []) | {"usage": self._usage(counts)}

    def _usage(self, counts: Counts) -> dict:
        num_cached = self.job.num_cached(counts.cached)
        drafts = counts.drafts.values()
        num_prompt = self.job.num_prompt_tokens
        return usage(num_prompt, counts.num_tokens, num_cached, drafts, counts.num_reasoning)

    def _chunk(self, index: int, fields: dict, delta: TextDelta, so_far: Counts) -> dict:
        logprobs = self._logprobs(index, delta)
        token_ids = self._token_ids(index, delta.token_ids, opens=index not in self.opened)
        self.opened.add(index)
        choice = {
            "index": index,
            **fields,
            "logprobs": logprobs,
            **self._ending(fields, index, delta),
            **token_ids,
        }
        chunk = self._envelope(self.chunk_object, [choice])
        if self.job.streams_usage_always:
            return chunk | {"usage": self._usage(so_far)}
        return chunk | {"usage": None} if self.job.streams_usage else chunk

    def _token_ids(self, index: int, token_ids: Sequence[int], *, opens: bool) -> dict:
        """A choice's tokens where they are asked for, and of its prompt with the first of them."""
        if not self.job.returns_token_ids:
            return {}
        prompt = self.job.prompt_of(index)
        return {"token_ids": list(token_ids), "prompt_token_ids": prompt if opens else None}

    def _logprobs(self, index: int, part: Output | TextDelta) -> dict | None:
        """OpenAI's log probabilities; None where nobody asked, and in a chunk without tokens."""
        is_empty_chunk = isinstance(part, TextDelta) and not part.logprobs
        of_prompt = None
        if self.job.echoed and index not in self.told:
            of_prompt = part.prompt_logprobs
        if self.job.params[0].logprobs is None or (is_empty_chunk and of_prompt is None):
            return None
        tokens = list(zip(part.token_ids, part.logprobs, strict=False))
        return self._format(index, tokens, of_prompt)

    def _told_of_prompt(self, index: int, output: Output) -> list[dict | None] | None:
        """`prompt_logprobs` of a choice; None: not asked for."""
        most = self.job.prompt_logprobs
        if most is None or output.prompt_logprobs is None:
            return None
        prompt = self.job.prompt_of(index)
        return prompt_logprobs(self.tokenizer, prompt, output.prompt_logprobs, most)

    def _of_choice_prompt(self, index: int, output: Output) -> dict:
        """What a choice tells of its prompt."""
        return {}

    def _of_prompt(self, outputs: list[Output]) -> dict:
        """What the reply tells of its prompt."""
        return {}

    def _ending(self, fields: dict, index: int, part: Output | TextDelta) -> dict:
        """How a choice ended; `fields`: what its reply or chunk has of it."""
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
            "choices": choices,
        }


class CompletionReply(Reply):
    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def _whole(self, index: int, output: Output) -> dict:
        return {"text": self.job.echo(index) + output.text}

    def _opening(self, index: int) -> dict | None:
        echo = self.job.echo(index)
        return {"text": echo} if echo else None

    def _delta(self, index: int, delta: TextDelta) -> dict:
        return {"text": delta.text}

    def _of_choice_prompt(self, index: int, output: Output) -> dict:
        told = self._told_of_prompt(index, output)
        return {} if told is None else {"prompt_logprobs": told}

    def _format(
        self, index: int, tokens: list[Token], of_prompt: Sequence[TokenLogprobs | None] | None
    ) -> dict:
        # What is read of them is the same for all choices.
        prompt, params = self.job.prompt_of(index), self.job.params[0]
        if index not in self.offsets:
            self.offsets[index] = TextOffsets(self.tokenizer, prompt, params.skip_special_tokens)
        start = len(self.job.echo(index))
        offsets = [start + self.offsets[index].take(token) for token, _ in tokens]
        if of_prompt is not None:
            self.told.add(index)
            before = TextOffsets(self.tokenizer, (), params.skip_special_tokens)
            echoed = [
                (token, cut(found, params.logprobs))
                for token, found in zip(prompt, of_prompt, strict=True)
            ]
            offsets = [before.take(token) for token in prompt] + offsets
            tokens = echoed + tokens
        formatted = completion_logprobs(self.tokenizer, tokens, offsets)
        if self.job.tokens_as_ids:
            formatted["tokens"] = [f"token_id:{token}" for token, _ in tokens]
        return formatted


class ChatReply(Reply):
    prefix = "chatcmpl-"
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def _whole(self, index: int, output: Output) -> dict:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        parsing = self.job.parsing
        if parsing is None:
            return {"message": message}
        is_cut = output.finish_reason == "length"
        found = Message.of(OutputParser(parsing).parse(output.text), is_cut=is_cut)
        return {"message": message | message_fields(found, parsing)}

    def _opening(self, index: int) -> dict | None:
        parsing = self.job.parsing
        # As in a whole answer, which has no content beside calls that have to be.
        is_call = parsing is not None and parsing.is_call
        return {"delta": {"role": "assistant", "content": None if is_call else ""}}

    def _delta(self, index: int, delta: TextDelta) -> dict:
        if self.job.parsing is not None:
            return {"delta": self._parsed(index, delta)}
        is_bare_end = not delta.text and delta.finish_reason is not None
        return {"delta": {} if is_bare_end else {"content": delta.text}}

    def _parsed(self, index: int, delta: TextDelta) -> dict:
        """The delta's fields where its text is parsed."""
        if index not in self.parsers:
            self.parsers[index] = OutputParser(self.job.parsing)
        pieces = self.parsers[index].push(delta.text)
        if delta.finish_reason is not None:
            pieces += self.parsers[index].finish()
        fields = delta_fields(pieces, self.job.parsing)
        if "tool_calls" in fields:
            self.called.add(index)
        # Empty where it is not known yet what the text will be: an empty content would be content.
        return fields

    def _ending(self, fields: dict, index: int, part: Output | TextDelta) -> dict:
        ending = super()._ending(fields, index, part)
        calls = index in self.called or fields.get("message", {}).get("tool_calls")
        if calls and part.finish_reason == "stop":
            return ending | {"finish_reason": "tool_calls"}
        return ending

    def _of_prompt(self, outputs: list[Output]) -> dict:
        told = self._told_of_prompt(0, outputs[0])
        return {} if told is None else {"prompt_logprobs": told}

    def _format(
        self, index: int, tokens: list[Token], of_prompt: Sequence[TokenLogprobs | None] | None
    ) -> dict:
        formatted = chat_logprobs(self.tokenizer, tokens)
        if self.job.tokens_as_ids:
            for entry, (token, _) in zip(formatted["content"], tokens, strict=True):
                entry["token"] = f"token_id:{token}"
        return formatted
