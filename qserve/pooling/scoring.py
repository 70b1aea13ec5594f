"""Scores of text pairs, by a reranker or as the cosine of two embeddings. Loads no torch.

The prompt asks a reranker such as Qwen3-Reranker whether the document answers the query. The score
is the probability of "yes" relative to "no". The prompt is from
https://huggingface.co/Qwen/Qwen3-Reranker-0.6B.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from formats.errors import InputError
from qserve.errors import ParameterError
from qserve.pooling.config import PoolingConfig
from qserve.pooling.params import LABELS, PoolingParams
from qserve.text.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_PAIR = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


# jina-reranker-m0's prompt, from https://huggingface.co/jinaai/jina-reranker-m0, its token for an
# image, and the token whose hidden state is scored
_RANKED = ("**Document**:\n", "\n**Query**:\n")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SCORE_TOKEN = 100
Side = TypeVar("Side")  # a text, or an image


def pairs(
    text_1: Side | Sequence[Side],
    text_2: Side | Sequence[Side],
    names: tuple[str, str] = ("text_1", "text_2"),
) -> list[tuple[Side, Side]]:
    """Pair one text with each of several texts, or two lists of equal length. Raises InputError.

    `names`: the two parameters, for errors. A side that is no list or tuple is one text or image.
    """
    first, second = (
        list(each) if isinstance(each, list | tuple) else [each] for each in (text_1, text_2)
    )
    for name, texts in zip(names, (first, second), strict=True):
        if not texts:
            raise ParameterError(name, "expected at least one text, found none", "send a text")
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise ParameterError(
            names[1],
            f"expected as many texts as in {names[0]}, {len(first)}, found {len(second)}",
            "send one text for each pair, or a single first text for all",
        )
    return list(zip(first, second, strict=True))


def pair_tokens(tokenizer: Tokenizer, query: str, document: str, instruction: str) -> list[int]:
    """Return the prompt of a reranker. The texts cannot create control tokens."""
    pair = _PAIR.format(instruction=instruction, query=query, document=document)
    before, after = (tokenizer.encode(text, False) for text in (_BEFORE, _AFTER))
    return [*before, *tokenizer.encode_plain(pair), *after]


def ranked_tokens(tokenizer: Tokenizer, query: str | None, document: str | None) -> list[int]:
    """Return the prompt of a ranker, with a placeholder for each image.

    None: an image. The texts cannot create control tokens.
    """
    found: list[int] = []
    text = ""
    for before, side in zip(_RANKED, (document, query), strict=True):
        text += before
        if side is None:
            found += [*tokenizer.encode_plain(text), *tokenizer.encode(IMAGE, False)]
            text = ""
        else:
            text += side
    return [*found, *(tokenizer.encode_plain(text) if text else ()), SCORE_TOKEN]


def score_params(config: PoolingConfig, tokenizer: Tokenizer) -> PoolingParams:
    """Return the pooling of each text; of each pair, if the model is a reranker."""
    if not config.is_reranker:
        return config.complete(PoolingParams(normalize=True))
    if config.ranks_pairs:
        return PoolingParams(kind=LABELS)
    tokens = config.score_tokens
    if not tokens:
        found = [tokenizer.encode(text, False) for text in config.score_texts]
        for text, each in zip(config.score_texts, found, strict=True):
            if len(each) != 1:
                raise InputError(
                    f"{tokenizer.folder}/config.json classifier_from_token",
                    f"expected texts of one token, found {text!r}, which has {len(each)}",
                    "give the two tokens that the reranker was trained to answer with",
                )
        tokens = tuple(each[0] for each in found)
    return PoolingParams(kind="tokens", token_ids=tokens)


def of_logits(logits: np.ndarray) -> float:
    """Return a reranker's score of a pair from the logits of yes and, optionally, no.

    A ranker's head gives one logit.
    """
    yes = float(logits[0])
    no = float(logits[1]) if len(logits) > 1 else 0.0
    return float(1 / (1 + np.exp(np.float64(no - yes))))


def of_vectors(first: np.ndarray, second: np.ndarray) -> float:
    """Return the cosine of two normalized vectors."""
    return float(np.dot(first.astype(np.float64), second.astype(np.float64)))


def probabilities(logits: np.ndarray) -> list[float]:
    """Return the softmax of a classifier's logits; the sigmoid if there is one label."""
    logits = logits.astype(np.float64)
    if len(logits) == 1:
        return (1 / (1 + np.exp(-logits))).tolist()
    raised = np.exp(logits - logits.max())
    return (raised / raised.sum()).tolist()
