"""Checkpoints of a model without its head, as embedding models are published.

Their tensors have no `model.` before their names, and config.json names a class such as Qwen3Model
or, all the same, Qwen3ForCausalLM. Every reader here sees the names and the class that has a head.
A classifier has a matrix of labels in place of the head.
"""

from collections.abc import Collection, Mapping
from typing import Any

from formats.families import FAMILIES

_WITH_HEAD, _BARE, _CLASSIFIER = "ForCausalLM", "Model", "ForSequenceClassification"
PREFIX = "model."
HEAD = "lm_head."
SCORE = "score.weight"  # [labels, hidden size], of a classifier
# of a config.json that is read: what the checkpoint has in place of a head
INSTEAD_OF_HEAD = "instead_of_head"
NOTHING = "nothing"  # the other is SCORE


def is_headless(config: Mapping[str, Any]) -> bool:
    """Whether config.json names a class without a head, of a family that is known."""
    return _class_with_head(config) is not None


def bare_names(names: Collection[str]) -> dict[str, str]:
    """Name in the file -> in the model, of tensors that lack the prefix; else empty."""
    if "embed_tokens.weight" not in names:
        return {}
    is_other = (HEAD, PREFIX, "score.")
    return {name: name if name.startswith(is_other) else PREFIX + name for name in names}


def with_head(config: dict[str, Any], names: Collection[str], *, is_bare: bool) -> dict[str, Any]:
    """config.json as the class with a head would have it. `names`: of the tensors, renamed.

    `is_bare`: they lacked the prefix. Where there is no head, and none is tied, the embedding
    stands for it and INSTEAD_OF_HEAD says so: what it computes means nothing.
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
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return None
    for ending in (_BARE, _CLASSIFIER):
        if names[0].endswith(ending):
            found = names[0].removesuffix(ending) + _WITH_HEAD
            return found if found in FAMILIES else None
    return None
