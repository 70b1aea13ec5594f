"""Pooling in the offline API: embeddings, scores and labels of prompts. Names follow vLLM's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, Union

import numpy as np
import torch
from tqdm import tqdm

from formats.errors import InputError
from formats.numerics.torch_state import torch_defaults
from qserve.errors import LEAVE_OUT, relayed_error
from qserve.hub.local import local_adapter
from qserve.library.llm_engine import LLMEngine
from qserve.library.prompts import PromptType, TokensPrompt, read_prompt, request_options_of
from qserve.lora.request import LoRARequest
from qserve.params.sampling_params import SamplingParams
from qserve.pooling import scoring
from qserve.pooling.params import ALL, LABELS, PoolingParams
from qserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

ScoreInput = Union[str, "Image"]  # a text, or an image for models that rank images
PoolingTask = Literal["embed", "token_embed", "classify"]  # vLLM's names
# Task -> kind of pooling; None: the model's default
TASKS: dict[PoolingTask, str | None] = {"embed": None, "token_embed": ALL, "classify": LABELS}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """Embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOutput:
    """Hidden states or logits of a prompt."""

    data: torch.Tensor  # float32: [C], or [tokens, C]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOutput:
    """Probability of each label of a classifier."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOutput:
    """Similarity of two texts, or a reranker's probability that they match."""

    score: float


Pooled = TypeVar("Pooled", EmbeddingOutput, PoolingOutput, ClassificationOutput, ScoringOutput)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequestOutput(Generic[Pooled]):
    """A prompt and its pooled output."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """Pooled values of one prompt, as the engine returns them."""

    request_id: str
    prompt_token_ids: list[int]
    values: np.ndarray  # float32: [C], [tokens, C], or logits
    num_cached: int

    def output(self, outputs: Pooled) -> PoolingRequestOutput[Pooled]:
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=outputs,
            prompt_token_ids=self.prompt_token_ids,
            num_cached_tokens=self.num_cached,
        )


@torch_defaults(dtype=False)
def run(
    engine: LLMEngine,
    prompts: Sequence[PromptType],
    params: Sequence[PoolingParams],
    names: Sequence[str],
    use_tqdm: bool,
    loras: Sequence[LoRARequest | None],
    *,
    takes_media: bool = False,
) -> list[Vectors]:
    """Run pooling requests in one batch; return results in the order of prompts.

    `takes_media`: prompts may have images. Raises InputError.
    """
    engine.check_health()
    if engine.has_unfinished_requests():
        raise InputError(
            "LLM", "other requests are running on its engine", "call step() until they are done"
        )
    core, tokens = engine.engine, {}
    kinds = {name: each.kind for name, each in zip(names, params, strict=True)}
    done: dict[str, Vectors] = {}
    try:
        for name, prompt, each, lora in zip(names, prompts, params, loras, strict=True):
            _, ids = read_prompt(prompt, engine.get_tokenizer, takes_media=takes_media)
            ids, media = engine.with_media(prompt, ids)
            options = request_options_of(prompt, 0, local_adapter(lora, core.config), media)
            options = replace(options, pooling=each)
            core.add_request(name, ids, SamplingParams(), options=options)
            tokens[name] = ids
        with tqdm(
            total=len(names), desc="Processed prompts", unit="request", disable=not use_tqdm
        ) as bar:
            while core.has_work():
                for event in core.step():
                    if event.finish_reason == "error":
                        raise relayed_error(f"request {event.request_id}", event.error)
                    values = np.frombuffer(event.pooled, "<f4")
                    ids = tokens[event.request_id]
                    if kinds[event.request_id] == ALL:
                        values = values.reshape(len(ids), -1)
                    done[event.request_id] = Vectors(
                        request_id=event.request_id,
                        prompt_token_ids=ids,
                        values=values,
                        num_cached=event.facts.num_cached,
                    )
                    bar.update()
    except BaseException:
        for name in tokens:
            core.abort(name)
        raise
    return [done[name] for name in names]


def ranked_prompt(tokenizer: Tokenizer, query: ScoreInput, document: ScoreInput) -> TokensPrompt:
    """Return a ranker's prompt for a pair of texts or images."""
    texts = [side if isinstance(side, str) else None for side in (query, document)]
    images = [side for side in (document, query) if not isinstance(side, str)]
    return {
        "prompt_token_ids": scoring.ranked_tokens(tokenizer, *texts),
        "multi_modal_data": {"image": images},
    }


def only_texts(pairs: Sequence[tuple[ScoreInput, ScoreInput]]) -> list[tuple[str, str]]:
    """Return pairs of texts. Raises InputError if a pair has something else."""
    for pair in pairs:
        for side in pair:
            if not isinstance(side, str):
                raise InputError(
                    "text_1, text_2",
                    f"expected texts, found {type(side).__name__}: this model ranks no images",
                    "give texts, or use a reranker that takes images, such as jina-reranker-m0",
                )
    return [(str(first), str(second)) for first, second in pairs]


def kind_of(task: str) -> str | None:
    """Return the kind of pooling for a task. Raises InputError for a task that is not in TASKS."""
    if task not in TASKS:
        raise InputError(
            "pooling_task", f"expected one of {', '.join(TASKS)}, found {task!r}", LEAVE_OUT
        )
    return TASKS[task]
