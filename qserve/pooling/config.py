"""PoolingConfig: pooling settings in a model folder. Loads no torch.

The settings are in sentence-transformers' files: modules.json, the folders of its modules, and
config_sentence_transformers.json. Without these files the default is as in Qwen3-Embedding: the
last token's hidden state, normalized.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from formats.architecture.family import architecture_of
from formats.architecture.text_part import RANKING
from formats.errors import InputError, one_line
from qserve.errors import LEAVE_OUT, ParameterError
from qserve.pooling.params import CLS, KINDS_OF_LOGITS, LAST, MEAN, PoolingParams

MODULES = "modules.json"
TRANSFORMER = "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
# sentence-transformers' names of the pooling: values of `pooling_mode`, and flags in older files
MODES = {"lasttoken": LAST, "cls": CLS, "mean": MEAN}
FLAGS = {
    "pooling_mode_lasttoken": LAST,
    "pooling_mode_cls_token": CLS,
    "pooling_mode_mean_tokens": MEAN,
}
OTHER_FLAGS = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)
# Module classes that are supported.
KNOWN_MODULES = ("Transformer", "Pooling", "Normalize", "LogitScore")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """A model's pooling settings: defaults for requests, and what the model can compute."""

    kind: str = LAST
    normalize: bool = True
    # Allowed numbers of dimensions besides the full size. None: any number.
    matryoshka: tuple[int, ...] | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)  # name -> text to prepend
    default_prompt: str | None = None
    # For rerankers: token ids of yes and, optionally, no. Their logits determine the score.
    score_tokens: tuple[int, ...] = ()
    score_texts: tuple[str, ...] = ()  # the same tokens, as texts
    ranks_pairs: bool = False  # True: the model's head computes the score of a pair
    hidden_size: int = 0
    is_embedder: bool = False  # True: the folder declares an embedding model
    is_chat: bool = False  # True: the chat template renders each text as a message
    problem: str = ""  # reason why the model cannot compute vectors; "": it can
    labels: tuple[str, ...] = ()  # a classifier's labels, in the order of its outputs

    @classmethod
    def from_folder(cls, folder: str | Path) -> "PoolingConfig":
        """Read the settings in a model folder. Raises InputError for invalid files."""
        return _from_folder(Path(folder))

    def complete(self, params: PoolingParams) -> PoolingParams:
        """Return parameters with the model's defaults for missing values. Raises InputError."""
        if params.kind in KINDS_OF_LOGITS:
            return params
        if self.problem:
            raise InputError(
                "model", f"cannot compute vectors: {self.problem}", "use another embedding model"
            )
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions)
        return replace(
            params,
            kind=params.kind or self.kind,
            normalize=self.normalize if params.normalize is None else params.normalize,
        )

    def prompt(self, name: str | None) -> str:
        """Return the prompt to prepend to an input: by name, or the default. Raises InputError."""
        name = name or self.default_prompt
        if name is not None and name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise ParameterError(
                "prompt_name", f"expected one of {known}, found {name!r}", LEAVE_OUT
            )
        return "" if name is None else self.prompts[name]

    @property
    def is_reranker(self) -> bool:
        """True if a prompt with both texts of a pair gives their score."""
        return bool(self.score_tokens or self.score_texts or self.ranks_pairs)

    def _check_dimensions(self, dimensions: int) -> None:
        if not 1 <= dimensions <= self.hidden_size:
            raise ParameterError(
                "dimensions", f"expected 1 to {self.hidden_size}, found {dimensions}", LEAVE_OUT
            )
        if dimensions == self.hidden_size or self.matryoshka is None:
            return
        if dimensions not in self.matryoshka:
            known = ", ".join(map(str, (*self.matryoshka, self.hidden_size)))
            raise ParameterError(
                "dimensions", f"expected one of {known}, found {dimensions}", LEAVE_OUT
            )


@functools.lru_cache(maxsize=8)
def _from_folder(folder: Path) -> PoolingConfig:
    config = _object(folder / "config.json")
    found: dict[str, Any] = {
        "hidden_size": config.get("hidden_size", 0),
        "matryoshka": _matryoshka(config),
        # vLLM's key; its order is no, yes
        "score_texts": tuple(map(str, reversed(config.get("classifier_from_token") or ()))),
        "problem": _attention_problem(config),
        "is_embedder": _is_bare(config),
        "ranks_pairs": architecture_of(config) == RANKING,
        "labels": _labels(config),
    }
    if (folder / PROMPTS).exists():
        stated = _object(folder / PROMPTS)
        prompts = stated.get("prompts") or {}
        found["prompts"] = {str(name): str(text) for name, text in prompts.items()}
        found["default_prompt"] = stated.get("default_prompt_name")
    if (folder / MODULES).exists():
        found |= _modules(folder)
    if (folder / TRANSFORMER).exists():
        found["is_chat"] = "message" in (_object(folder / TRANSFORMER).get("modality_config") or {})
    return PoolingConfig(**found)


def _modules(folder: Path) -> dict[str, Any]:
    """Read modules.json and the files of the modules."""
    found: dict[str, Any] = {"normalize": False}
    is_embedder = False
    for module in _read(folder / MODULES):
        kind = str(module.get("type", "")).rpartition(".")[2]
        place = folder / str(module.get("path", "")) / "config.json"
        if kind not in KNOWN_MODULES:
            found["problem"] = f"the module {kind} is not supported"
        elif kind == "Normalize":
            found["normalize"] = True
        elif kind == "Pooling":
            found |= _pooling(_object(place))
            is_embedder = True
        elif kind == "LogitScore":
            scores = _object(place)
            ids = (scores.get("true_token_id"), scores.get("false_token_id"))
            found["score_tokens"] = tuple(token for token in ids if token is not None)
    return found | {"is_embedder": is_embedder}


def _pooling(config: Mapping[str, Any]) -> dict[str, Any]:
    mode = config.get("pooling_mode")
    if mode is None:
        modes = [kind for flag, kind in FLAGS.items() if config.get(flag)]
        modes += [flag for flag in OTHER_FLAGS if config.get(flag)]
    else:
        modes = [MODES.get(each, each) for each in ([mode] if isinstance(mode, str) else mode)]
    if len(modes) != 1 or modes[0] not in MODES.values():
        return {"problem": f"the pooling {', '.join(map(str, modes))} is not supported"}
    if config.get("include_prompt") is False:
        return {"problem": "pooling without the prompt's tokens is not supported"}
    return {"kind": modes[0]}


def _matryoshka(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the numbers of dimensions that config.json allows; None: it does not list them."""
    if config.get("is_matryoshka") is False:
        return ()
    named = config.get("matryoshka_dimensions")
    return None if named is None else tuple(sorted(named))


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    named = config.get("id2label")
    if not isinstance(named, dict) or not all(map(str.isdecimal, named)):
        return ()
    return tuple(str(named[number]) for number in sorted(named, key=int))


def _is_bare(config: Mapping[str, Any]) -> bool:
    """Return True if config.json names a class without an output head, such as Qwen3Model."""
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and str(names[0]).endswith("Model")


def _attention_problem(config: Mapping[str, Any]) -> str:
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        return "the model attends to later tokens, but only causal attention is supported"
    return ""


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            str(path), f"cannot be read: {one_line(error)}", "download it again"
        ) from None


def _object(path: Path) -> dict[str, Any]:
    found = _read(path)
    if not isinstance(found, dict):
        raise InputError(
            str(path),
            f"expected a JSON object, found {type(found).__name__}",
            "copy it from the original model",
        )
    return found
