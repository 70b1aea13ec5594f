"""Checkpoints of a model without its output head, as embedding models are published.

Their tensor names lack the `model.` prefix. config.json names a class such as Qwen3Model, or still
Qwen3ForCausalLM. The reader presents names and class of the model with a head. A classifier has a
label matrix (SCORE) instead of the head, a ranker two linears (RANKER_TENSORS).
"""

from collections.abc import Collection, Mapping
from typing import Any

from formats.architecture.family import architecture_of
from formats.families import FAMILIES

_WITH_HEAD, _BARE, _CLASSIFIER = "ForCausalLM", "Model", "ForSequenceClassification"
PREFIX = "model."
HEAD = "lm_head."
SCORE = "score.weight"  # label matrix of a classifier, [labels, hidden size]
# Ranker of Qwen2-VL's form (jina-reranker-m0): two linears with ReLU between them make one score.
# The tensors are this prefix and the names of `torch.nn.Sequential`.
RANKER = "score.2.weight"
RANKER_TENSORS = ("score.0.weight", "score.0.bias", RANKER, "score.2.bias")
SCORE_OFFSET = "score_offset"  # key added to the config: number that is added to the score
# key added to the config: the tensor that replaces the head, SCORE, RANKER or NOTHING
INSTEAD_OF_HEAD = "instead_of_head"
NOTHING = "nothing"


def is_headless(config: Mapping[str, Any]) -> bool:
    """Return True if config.json names the headless class of a known family."""
    return _class_with_head(config) is not None


def bare_names(names: Collection[str]) -> dict[str, str]:
    """Map names in the file to names in the model if the prefix is missing; else {}."""
    if not any(name.startswith("embed_tokens.") for name in names):
        return {}
    is_other = (HEAD, PREFIX, "score.")
    return {name: name if name.startswith(is_other) else PREFIX + name for name in names}


def with_head(config: dict[str, Any], names: Collection[str], *, is_bare: bool) -> dict[str, Any]:
    """Return config.json as the class with a head states it. `names` are the renamed tensors.

    `is_bare`: their prefix was missing. If there is no head, not even a tied one, the embedding is
    used as the head and INSTEAD_OF_HEAD is set: the logits are meaningless.
    """
    named = _class_with_head(config)
    if named is not None:
        config = {**config, "architectures": [named]}
    has_head = config.get("tie_word_embeddings") or any(name.startswith(HEAD) for name in names)
    if SCORE in names and named is not None:
        instead = SCORE
    elif has_head or (named is None and not is_bare):
        return config
    else:
        instead = NOTHING
    return {**config, "tie_word_embeddings": True, INSTEAD_OF_HEAD: instead}


def _class_with_head(config: Mapping[str, Any]) -> str | None:
    name = architecture_of(config) or ""
    for ending in (_BARE, _CLASSIFIER):
        if name.endswith(ending):
            found = name.removesuffix(ending) + _WITH_HEAD
            return found if found in FAMILIES else None
    return None
