"""LLM: offline inference with the engine in this process. Names follow vLLM's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from tqdm import tqdm

from formats.errors import InputError
from formats.numerics.torch_state import torch_defaults
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.library import llm_beams, llm_pooling
from qserve.library.beam_outputs import BeamSearchOutput
from qserve.library.engine_owner import EngineOwner
from qserve.library.llm_control import LLMControl
from qserve.library.llm_engine import LLMEngine
from qserve.library.llm_pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    PoolingTask,
    ScoreInput,
    ScoringOutput,
    ScoringRequestOutput,
    Vectors,
)
from qserve.library.media_prompts import split_media
from qserve.library.outputs import RequestOutput
from qserve.library.prompts import PromptType, as_batch, as_conversations, token_list
from qserve.lora.request import LoRARequest
from qserve.multimodal.media import MediaItem
from qserve.params.beam_search_params import BeamSearchParams
from qserve.params.generation_defaults import load_defaults
from qserve.params.sampling_params import SamplingParams
from qserve.pooling import scoring
from qserve.pooling.config import PoolingConfig
from qserve.pooling.params import LABELS, PoolingParams
from qserve.pooling.text import input_tokens
from qserve.profile.profiler_config import ProfilerConfig
from qserve.text.tokenizer import Tokenizer

# Messages in OpenAI's format: {"role": "user", "content": "Hi"}
Conversation = Sequence[Mapping[str, Any]]


class LLM(LLMControl, EngineOwner):
    """A model for offline inference: `LLM("./model").generate("Hello")`."""

    def _start_on(self, config: EngineConfig) -> None:
        self.llm_engine = LLMEngine(config)
        self._num_requests = 0

    @property
    def engine(self) -> Engine:
        """The engine inside `llm_engine`: takes token ids and returns events."""
        return self.llm_engine.engine

    def close(self) -> None:
        """Stop the processes that this object started: other ranks and grammar checks."""
        self.engine.close()

    def capture_graphs(self) -> None:
        """Capture all CUDA graphs now. By default a graph is captured when a step first needs it.

        Call this before a measurement, so that no step waits for a capture.
        """
        self.llm_engine.capture_graphs()

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. It is loaded on the first call."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default parameters of `generate`; generation_config.json sets some."""
        return SamplingParams(**load_defaults(self.engine.config.model))

    @overload
    def generate(
        self,
        prompts: Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: PromptType,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: a text, token ids, a TextPrompt or a TokensPrompt.

        Returns the outputs in the order of the prompts. `sampling_params` and `lora_request`: one
        for all prompts, or one for each. `priority`: one for each prompt; the scheduling policy
        "priority" runs lower values first. Raises InputError.
        """
        self._check_awake()
        batch = as_batch(prompts)
        if isinstance(sampling_params, Sequence):
            params = list(sampling_params)
        else:
            params = [sampling_params or self.get_default_sampling_params()] * len(batch)
        if len(params) != len(batch):
            raise InputError(
                "sampling_params",
                f"expected one or {len(batch)}, found {len(params)}",
                "give one object for all prompts, or a list with one for each",
            )
        priorities = [0] * len(batch) if priority is None else list(priority)
        if len(priorities) != len(batch):
            raise InputError(
                "priority",
                f"expected {len(batch)}, found {len(priorities)}",
                "give one number for each prompt",
            )
        loras = _each(lora_request, len(batch))
        for each in params:
            if not isinstance(each, SamplingParams):
                problem = f"expected SamplingParams, found {type(each).__name__}"
                raise InputError(
                    "sampling_params", problem, "such as SamplingParams(max_tokens=32)"
                )
        names = [str(self._num_requests + i) for i in range(len(batch))]
        self._num_requests += len(batch)
        each_of = zip(names, batch, params, priorities, loras, strict=True)
        try:
            for name, prompt, each, order, lora in each_of:
                self.llm_engine.add_request(name, prompt, each, lora_request=lora, priority=order)
            found = self._run(len(batch), use_tqdm)
        except BaseException:
            self.llm_engine.abort_request(names)
            raise
        return [found[name] for name in names]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations. The model's chat template renders the messages.

        `continue_final_message`: the answer continues the text of the last message.
        `tools`: functions that the model may call, in OpenAI's format; the template renders them,
        and the output's text has the calls in the model's own notation.
        `chat_template_kwargs`: more variables for the template, such as enable_thinking. A message
        content may be a list of parts: {"type": "image", "image": a PIL image}, {"type": "video",
        "video": frames, "fps": N}, or a part of type image_url or video_url with a data: URL.
        Raises InputError.
        """
        settings = {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "template_kwargs": chat_template_kwargs,
            "tools": None if tools is None else list(tools),
        }
        conversations = as_conversations(messages)
        tokenizer = self.get_tokenizer()
        if tools and not tokenizer.reads_tools:
            raise InputError(
                "tools",
                "the model's chat template does not render them, so the model would not see them",
                "use a model that is made for tools, or describe them in a message",
            )
        split = [split_media(each) for each in conversations]
        conversations = [messages for messages, _ in split]
        prompts: list[PromptType] = [
            {
                "prompt_token_ids": tokenizer.encode_chat(each, **settings),
                "multi_modal_data": media,
            }
            for each, media in split
        ]
        outputs = self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)
        return [
            replace(output, prompt=tokenizer.render_chat(each, **settings))
            for output, each in zip(outputs, conversations, strict=True)
        ]

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        *,
        detokenize: bool = True,
    ) -> list[BeamSearchOutput]:
        """Return the best continuations of each prompt, found by beam search.

        With `detokenize` False the sequences have no text; no tokenizer is then loaded for prompts
        that are token ids. Raises InputError.
        """
        self._check_awake()
        batch = as_batch(prompts)
        names = [str(self._num_requests + i) for i in range(len(batch))]
        self._num_requests += len(batch)
        return llm_beams.run(self.llm_engine, batch, params, names, use_tqdm, detokenize)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        self.engine.reset_prefix_cache()

    def start_profile(self, folder: str = "profile", with_stack: bool = False) -> None:
        """Profile steps until `stop_profile`, which writes a trace and a table to `folder`."""
        self.engine.profiler.start(ProfilerConfig(folder=folder, with_stack=with_stack))

    def stop_profile(self) -> None:
        """Stop the profile that `start_profile` began, and write it."""
        self.engine.profiler.stop()

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        prompt_name: str | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed each prompt. Defaults for pooling come from the files in the model's folder.

        `prompt_name`: name of the prefix, such as "query", that is put before each text; the
        model's folder defines the prefixes and the default. Raises InputError.
        """
        batch = self._input_tokens(as_batch(prompts), prompt_name)
        found = self._pool(batch, pooling_params, use_tqdm, lora_request=lora_request)
        return [
            each.output(EmbeddingOutput(embedding=each.values.reshape(-1).tolist()))
            for each in found
        ]

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        pooling_task: PoolingTask = "token_embed",
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return hidden states after the last norm, as tensors: one per token or one per prompt.

        `pooling_task` is ignored for `pooling_params` with a kind. To encode a text to token ids,
        use `get_tokenizer().encode`. Raises InputError.
        """
        kind = llm_pooling.kind_of(pooling_task)
        found = self._pool(prompts, pooling_params, use_tqdm, kind, lora_request)
        return [
            each.output(PoolingOutput(data=torch.tensor(each.values, device="cpu")))
            for each in found
        ]

    def classify(
        self, prompts: PromptType | Sequence[PromptType], use_tqdm: bool = True
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of a classifier's labels.

        Raises InputError if the model has no labels.
        """
        found = self._pool(prompts, PoolingParams(kind=LABELS), use_tqdm)
        return [
            each.output(ClassificationOutput(probs=scoring.probabilities(each.values)))
            for each in found
        ]

    def score(
        self,
        text_1: ScoreInput | Sequence[ScoreInput],
        text_2: ScoreInput | Sequence[ScoreInput],
        use_tqdm: bool = True,
        instruction: str = scoring.INSTRUCTION,
    ) -> list[ScoringRequestOutput]:
        """Score how well texts match: one text against each of several, or pair by pair.

        The score of a reranker is its probability of "yes" under `instruction`; the score of other
        models is the cosine of the two embeddings. jina-reranker-m0 reads no instruction and takes
        Pillow images, too; text_1 is the query. Raises InputError.
        """
        sides = scoring.pairs(text_1, text_2)
        config, tokenizer = self._pooling_config(), self.get_tokenizer()
        params = scoring.score_params(config, tokenizer)
        if config.ranks_pairs:
            ranked = [llm_pooling.ranked_prompt(tokenizer, *pair) for pair in sides]
            found = self._pool(ranked, params, use_tqdm, takes_media=True)
            return [
                each.output(ScoringOutput(score=scoring.of_logits(each.values))) for each in found
            ]
        pairs = llm_pooling.only_texts(sides)
        if config.is_reranker:
            prompts = [scoring.pair_tokens(tokenizer, *pair, instruction) for pair in pairs]
            found = self._pool(prompts, params, use_tqdm)
            return [
                each.output(ScoringOutput(score=scoring.of_logits(each.values))) for each in found
            ]
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        vectors = self._pool(self._input_tokens(texts), params, use_tqdm)
        of = dict(zip(texts, vectors, strict=True))
        return [
            of[second].output(
                ScoringOutput(score=scoring.of_vectors(of[first].values, of[second].values))
            )
            for first, second in pairs
        ]

    @torch_defaults(dtype=False)
    def logits(self, token_ids: list[int], media: Sequence[MediaItem] = ()) -> torch.Tensor:
        """Return float32 logits [S, V] after each of S tokens. The engine must be idle.

        `media`: images and videos in the sequence (multimodal.processor.MediaProcessor).
        """
        return self.engine.logits(token_list(token_ids), media)

    def check_health(self) -> None:
        """Raise EngineDeadError if a step has failed."""
        self.llm_engine.check_health()

    def _pooling_config(self) -> PoolingConfig:
        return PoolingConfig.from_folder(self.engine.config.model)

    def _input_tokens(
        self, batch: list[PromptType], prompt_name: str | None = None
    ) -> list[PromptType]:
        """Return the prompts, with each text replaced by its token ids."""
        config = self._pooling_config()
        return [
            input_tokens(config, self.get_tokenizer(), each, prompt_name)
            if isinstance(each, str)
            else each
            for each in batch
        ]

    def _pool(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: PoolingParams | Sequence[PoolingParams] | None,
        use_tqdm: bool,
        kind: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        takes_media: bool = False,
    ) -> list[Vectors]:
        self._check_awake()
        batch, config = as_batch(prompts), self._pooling_config()
        if not isinstance(params, Sequence):
            params = [params or PoolingParams()] * len(batch)
        if len(params) != len(batch):
            raise InputError(
                "pooling_params",
                f"expected one or {len(batch)}, found {len(params)}",
                "give one object for all prompts, or a list with one for each",
            )
        params = [replace(each, kind=each.kind or kind) for each in params]
        names = [str(self._num_requests + i) for i in range(len(batch))]
        self._num_requests += len(batch)
        complete, loras = (
            [config.complete(each) for each in params],
            _each(lora_request, len(batch)),
        )
        return llm_pooling.run(
            *(self.llm_engine, batch, complete, names, use_tqdm, loras), takes_media=takes_media
        )

    def _run(self, num_requests: int, use_tqdm: bool) -> dict[str, RequestOutput]:
        """Run steps until all requests are finished. Raises InputError if one fails."""
        done: dict[str, RequestOutput] = {}
        num_input = num_output = 0
        with tqdm(
            total=num_requests,
            desc="Processed prompts",
            unit="request",
            postfix="input 0 tokens/s, output 0 tokens/s",
            disable=not use_tqdm,
        ) as bar:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.run_step():
                    if not output.finished:
                        continue
                    done[output.request_id] = output
                    for completion in output.outputs:
                        num_output += len(completion.token_ids)
                        if completion.finish_reason == "error":
                            raise InputError(
                                f"request {output.request_id}-{completion.index}",
                                str(completion.stop_reason),
                                ""
                                if completion.is_asked_for
                                else "check the model with `qserve inspect`",
                            )
                    num_input += len(output.prompt_token_ids)
                    if use_tqdm:
                        seconds = max(bar.format_dict["elapsed"], 1e-9)
                        bar.postfix = (
                            f"input {num_input / seconds:,.0f} tokens/s,"
                            f" output {num_output / seconds:,.0f} tokens/s"
                        )
                    bar.update()
        return done


def _each(
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None, count: int
) -> Sequence[LoRARequest | None]:
    """Return the adapter of each of `count` prompts. Raises InputError for another number."""
    if not isinstance(lora_request, Sequence):
        return [lora_request] * count
    if len(lora_request) != count:
        raise InputError(
            "lora_request",
            f"expected one or {count}, found {len(lora_request)}",
            "give one adapter for all prompts, or a list with one for each",
        )
    return lora_request
