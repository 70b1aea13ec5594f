"""LLM: the engine in this process, for offline use. Names follow vLLM's. Knows no HTTP."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm import tqdm

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.request import RequestEvent, TokenLogprobs
from qserve.sampling_params import SamplingParams
from qserve.text import TextStream, Tokenizer

Prompt = str | Sequence[int]
Messages = list[dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One continuation of a prompt. `generate` fills it step by step."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    logprobs: list[TokenLogprobs] | None = None  # of each of token_ids, where asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its `n` continuations."""

    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class LLM:
    """A model for offline use: `LLM("./model").generate("Hello")`."""

    def __init__(self, model: str, **settings: Any) -> None:
        """`settings` are EngineConfig's fields. Raises InputError."""
        unknown = settings.keys() - EngineConfig.__dataclass_fields__.keys()
        if unknown:
            raise InputError(f"LLM({', '.join(sorted(unknown))})", "no such setting")
        self.engine = Engine(EngineConfig(model=str(model), **settings))
        self._tokenizer: Tokenizer | None = None
        self._num_requests = 0

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded when first needed: prompts of token ids need none."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.engine.config.model)
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        detokenize: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt, a text or a list of token ids; outputs come in the prompts' order.

        `detokenize` False leaves texts empty and needs no tokenizer. Raises InputError.
        """
        batch = _as_batch(prompts)
        if isinstance(sampling_params, Sequence):
            params = list(sampling_params)
        else:
            params = [sampling_params or SamplingParams()] * len(batch)
        if len(params) != len(batch):
            raise InputError(
                "sampling_params", f"expected one or {len(batch)}, found {len(params)}"
            )
        outputs: list[RequestOutput] = []
        streams: dict[str, tuple[CompletionOutput, TextStream | None]] = {}
        try:
            for prompt, each in zip(batch, params, strict=True):
                outputs.append(self._add(prompt, each, streams, detokenize))
            self._run(streams, use_tqdm)
        except BaseException:
            for request_id in streams:
                self.engine.abort(request_id)
            raise
        return outputs

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered by the model's chat template.

        `chat_template_kwargs`: what the template reads beside them, such as enable_thinking.
        """
        settings = {
            "add_generation_prompt": add_generation_prompt,
            "template_kwargs": chat_template_kwargs,
        }
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        tokenizer = self.get_tokenizer()
        prompts = [tokenizer.encode_chat(each, **settings) for each in conversations]
        outputs = self.generate(prompts, sampling_params, use_tqdm)
        return [
            replace(output, prompt=tokenizer.render_chat(each, **settings))
            for output, each in zip(outputs, conversations, strict=True)
        ]

    def reset_prefix_cache(self) -> None:
        """Forget the KV pages of earlier prompts: those that come find none."""
        self.engine.reset_prefix_cache()

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """The model's logits [S, V] after each of S tokens, float32. Needs an idle engine."""
        return self.engine.logits(token_ids)

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        streams: dict[str, tuple[CompletionOutput, TextStream | None]],
        detokenize: bool,
    ) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else None
        ids = self.get_tokenizer().encode(prompt) if text is not None else list(prompt)
        if params.stop and not detokenize:
            raise InputError("stop", "needs text", "leave detokenize on")
        name = str(self._num_requests)
        self._num_requests += 1
        output = RequestOutput(
            request_id=name,
            prompt=text,
            prompt_token_ids=ids,
            outputs=[CompletionOutput(index=i) for i in range(params.n)],
        )
        for completion in output.outputs:
            child = params.choice(completion.index)
            request_id = f"{name}-{completion.index}"
            self.engine.add_request(request_id, ids, child)
            stream = TextStream(self.get_tokenizer(), child, ids) if detokenize else None
            streams[request_id] = (completion, stream)
        return output

    def _run(
        self, streams: dict[str, tuple[CompletionOutput, TextStream | None]], use_tqdm: bool
    ) -> None:
        with tqdm(total=len(streams), desc="Processed prompts", disable=not use_tqdm) as bar:
            num_open = len(streams)
            while num_open:
                for event in self.engine.step():
                    completion, stream = streams[event.request_id]
                    if completion.finish_reason is None:
                        self._take(event, completion, stream)
                        num_open -= completion.finish_reason is not None
                        bar.update(completion.finish_reason is not None)

    def _take(
        self, event: RequestEvent, completion: CompletionOutput, stream: TextStream | None
    ) -> None:
        if event.finish_reason == "error":
            remedy = "look at the model with `qserve inspect`"
            raise InputError(f"request {event.request_id}", event.error, remedy)
        completion.token_ids += event.token_ids
        if event.logprobs:
            completion.logprobs = [*(completion.logprobs or ()), *event.logprobs]
        if stream is None:
            completion.finish_reason, completion.stop_reason = event.finish_reason, event.stop_token
            return
        delta = stream.push(event)
        completion.text += delta.text
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.finish_reason is not None and event.finish_reason is None:
            self.engine.abort(event.request_id)  # a stop string ended it


def _as_batch(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts
