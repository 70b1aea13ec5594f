"""LLM: the engine in this process, for offline use. Names follow vLLM's. Knows no HTTP."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from formats.errors import InputError
from qserve import llm_beams, llm_pooling, scoring
from qserve.beam_outputs import BeamSearchOutput
from qserve.beam_search_params import BeamSearchParams
from qserve.config import engine_config
from qserve.engine.engine import Engine
from qserve.engine.start_phases import phase
from qserve.generation_defaults import load_defaults
from qserve.llm_engine import LLMEngine
from qserve.llm_pooling import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    Vectors,
)
from qserve.lora.request import LoRARequest
from qserve.outputs import Prompt, RequestOutput, as_batch
from qserve.pooling_config import PoolingConfig
from qserve.pooling_params import LABELS, PoolingParams
from qserve.pooling_text import input_tokens
from qserve.profile.profiler_config import ProfilerConfig
from qserve.sampling_params import SamplingParams
from qserve.text import Tokenizer

Messages = list[dict[str, Any]]


class LLM:
    """A model for offline use: `LLM("./model").generate("Hello")`."""

    def __init__(self, model: str, **settings: Any) -> None:
        """`settings` are EngineConfig's fields. Raises InputError."""
        self.llm_engine = LLMEngine(engine_config("LLM", model, settings))
        self._num_requests = 0
        if self.engine.use_idle_time():  # requests come at once: there will be no idle time
            with phase("Capturing the other CUDA graphs"):
                while self.engine.use_idle_time():
                    pass

    @property
    def engine(self) -> Engine:
        """What is below the texts."""
        return self.llm_engine.engine

    def close(self) -> None:
        """End the other ranks of a model that is shared out. Nothing can be asked after it."""
        self.engine.close()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded when first needed: prompts of token ids need none."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where it is given nothing; generation_config.json counts."""
        return SamplingParams(**load_defaults(self.engine.config.model))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        detokenize: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt, a text, a list of token ids, or a dict with one of them.

        Outputs come in the prompts' order. `detokenize` False leaves texts empty and needs no
        tokenizer. `priority`: one for each prompt; with the policy "priority" the lower go first.
        `lora_request`: the adapter to run with, or one for each prompt. Raises InputError.
        """
        batch = as_batch(prompts)
        if isinstance(sampling_params, Sequence):
            params = list(sampling_params)
        else:
            params = [sampling_params or self.get_default_sampling_params()] * len(batch)
        if len(params) != len(batch):
            raise InputError(
                "sampling_params", f"expected one or {len(batch)}, found {len(params)}"
            )
        priorities = [0] * len(batch) if priority is None else list(priority)
        if len(priorities) != len(batch):
            raise InputError("priority", f"expected {len(batch)}, found {len(priorities)}")
        loras = lora_request if isinstance(lora_request, Sequence) else [lora_request] * len(batch)
        if len(loras) != len(batch):
            raise InputError("lora_request", f"expected one or {len(batch)}, found {len(loras)}")
        names = [str(self._num_requests + i) for i in range(len(batch))]
        self._num_requests += len(batch)
        each_of = zip(names, batch, params, priorities, loras, strict=True)
        try:
            for name, prompt, each, order, lora in each_of:
                self.llm_engine.add_request(
                    name,
                    prompt,
                    each,
                    lora_request=lora,
                    priority=order,
                    detokenize=detokenize,
                )
            found = self._run(len(batch), use_tqdm)
        except BaseException:
            self.llm_engine.abort_request(names)
            raise
        return [found[name] for name in names]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered by the model's chat template.

        `chat_template_kwargs`: what the template reads beside them, such as enable_thinking.
        `continue_final_message`: the answer goes on with the last message's text.
        """
        settings = {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "template_kwargs": chat_template_kwargs,
        }
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        tokenizer = self.get_tokenizer()
        prompts = [tokenizer.encode_chat(each, **settings) for each in conversations]
        outputs = self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)
        return [
            replace(output, prompt=tokenizer.render_chat(each, **settings))
            for output, each in zip(outputs, conversations, strict=True)
        ]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        detokenize: bool = True,
    ) -> list[BeamSearchOutput]:
        """The best continuations of each prompt, found by a beam search. Raises InputError.

        `detokenize` False leaves texts out and needs no tokenizer for prompts of token ids.
        """
        batch = as_batch(prompts)
        names = [str(self._num_requests + i) for i in range(len(batch))]
        self._num_requests += len(batch)
        return llm_beams.run(self.llm_engine, batch, params, names, use_tqdm, detokenize)

    def reset_prefix_cache(self) -> None:
        """Forget the KV pages of earlier prompts: those that come find none."""
        self.engine.reset_prefix_cache()

    def start_profile(self, folder: str = "profile", with_stack: bool = False) -> None:
        """Record steps until `stop_profile`, which writes a trace and its table into a folder."""
        self.engine.profiler.start(ProfilerConfig(folder=folder, with_stack=with_stack))

    def stop_profile(self) -> None:
        self.engine.profiler.stop()

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """A vector of each prompt, made as the model's folder says where the parameters do not.

        `prompt_name`: of the folder's texts, such as "query", the one that goes before each text
        of `prompts`; unless given, the folder's default. Raises InputError.
        """
        batch = self._input_tokens(as_batch(prompts), prompt_name)
        found = self._pool(batch, pooling_params, use_tqdm)
        return [
            each.output(EmbeddingOutput(embedding=each.values.reshape(-1).tolist()))
            for each in found
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        pooling_task: str = "token_embed",
    ) -> list[PoolingRequestOutput]:
        """Hidden states after the last norm, as tensors: of each token, or of one vector.

        `pooling_task`: "token_embed", "embed" or "classify", where the parameters say no kind.
        For token ids use `get_tokenizer().encode`. Raises InputError.
        """
        kind = llm_pooling.kind_of(pooling_task)
        found = self._pool(prompts, pooling_params, use_tqdm, kind)
        return [each.output(PoolingOutput(data=torch.tensor(each.values))) for each in found]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True
    ) -> list[PoolingRequestOutput]:
        """The probabilities of a classifier's labels. Raises InputError where it has none."""
        found = self._pool(prompts, PoolingParams(kind=LABELS), use_tqdm)
        return [
            each.output(ClassificationOutput(probs=scoring.probabilities(each.values)))
            for each in found
        ]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        use_tqdm: bool = True,
        instruction: str = scoring.INSTRUCTION,
    ) -> list[PoolingRequestOutput]:
        """How well texts belong together: one with each of several, or pair by pair.

        A reranker's probability of yes, for which it reads `instruction`; else the cosine of the
        two embeddings. Raises InputError.
        """
        pairs = scoring.pairs(text_1, text_2)
        config, tokenizer = self._pooling_config(), self.get_tokenizer()
        params = scoring.score_params(config, tokenizer)
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

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """The model's logits [S, V] after each of S tokens, float32. Needs an idle engine."""
        return self.engine.logits(token_ids)

    def check_health(self) -> None:
        """Raises EngineDeadError where a step has failed."""
        self.llm_engine.check_health()

    def _pooling_config(self) -> PoolingConfig:
        return PoolingConfig.from_folder(self.engine.config.model)

    def _input_tokens(self, batch: list[Prompt], prompt_name: str | None = None) -> list[Prompt]:
        """The same, with the tokens of texts."""
        config = self._pooling_config()
        return [
            input_tokens(config, self.get_tokenizer(), each, prompt_name)
            if isinstance(each, str)
            else each
            for each in batch
        ]

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None,
        use_tqdm: bool,
        kind: str | None = None,
    ) -> list[Vectors]:
        batch, config = as_batch(prompts), self._pooling_config()
        if not isinstance(params, Sequence):
            params = [params or PoolingParams()] * len(batch)
        if len(params) != len(batch):
            raise InputError("pooling_params", f"expected one or {len(batch)}, found {len(params)}")
        params = [replace(each, kind=each.kind or kind) for each in params]
        names = [str(self._num_requests + i) for i in range(len(batch))]
        self._num_requests += len(batch)
        complete = [config.complete(each) for each in params]
        return llm_pooling.run(self.llm_engine, batch, complete, names, use_tqdm)

    def _run(self, num_requests: int, use_tqdm: bool) -> dict[str, RequestOutput]:
        """Step until every request is done. Raises InputError where one fails."""
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
                                else "look at the model with `qserve inspect`",
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
