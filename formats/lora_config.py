"""adapter_config.json of a PEFT LoRA folder: which modules it adapts, at what rank, how strongly.

Every key is read, refused by its name, or known to change nothing. Knows no tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from formats.checkpoint import read_json
from formats.errors import CheckpointError
from formats.patterns import regex

ADAPTER_CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"
MAX_RANK = 1024  # far more than anybody trains
MERGE = "merge it into the float model with PEFT's merge_and_unload, and quantize that"

# Keys that change nothing of what a trained adapter computes.
IGNORED = {
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"),
    *("task_type", "lora_dropout", "megatron_core", "runtime_config", "qalora_group_size"),
    *("ensure_weight_tying", "eva_config", "lora_ga_config", "corda_config", "loftq_config"),
}
READ = {
    *("peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern"),
    *("alpha_pattern", "use_rslora", "layers_to_transform", "layers_pattern"),
    "init_lora_weights",
}
# Keys whose values change the arithmetic, or the base model: what each one is.
REFUSED = {
    "use_dora": "DoRA scales the merged weight's columns",
    "modules_to_save": "whole modules that replace the base model's",
    "bias": "trained biases",
    "lora_bias": "biases of lora_B",
    "fan_in_fan_out": "weights of Conv1D, which are transposed",
    "layer_replication": "layers that stand in the model several times",
    "trainable_token_indices": "new rows of the embedding",
    "target_parameters": "adapters of parameters, such as experts in one tensor",
    "alora_invocation_tokens": "an adapter that begins within the prompt (aLoRA)",
    "use_qalora": "QA-LoRA pools the inputs of a group",
    "use_bdlora": "block-diagonal matrices",
    "megatron_config": "Megatron's parallel layers",
}
# What initialized A and B by taking it away from the base model's weights.
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """What an adapter_config.json says. Modules are named as in the base checkpoint."""

    source: str  # the file, for errors
    rank: int
    alpha: float
    target: str | tuple[str, ...]  # an expression of whole names, or ends of names
    excluded: str | tuple[str, ...]
    layers: frozenset[int] | None  # that are adapted; None: all
    layers_pattern: tuple[str, ...]  # names of lists of layers; (): any
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rslora: bool

    @classmethod
    def from_folder(cls, folder: str | Path) -> "LoraConfig":
        """Read and check the whole file. Raises CheckpointError."""
        path = Path(folder) / ADAPTER_CONFIG
        if not path.is_file():
            raise CheckpointError(
                str(folder), f"has no {ADAPTER_CONFIG}", "give a folder that PEFT has saved"
            )
        return cls.from_dict(read_json(path), str(path))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], source: str = ADAPTER_CONFIG) -> "LoraConfig":
        """The same of its values."""
        if config.get("peft_type") != "LORA":
            raise CheckpointError(
                f"{source} peft_type", f"expected 'LORA', found {config.get('peft_type')!r:.100}"
            )
        _check_refused(config, source)
        rank = _rank(f"{source} r", config.get("r", 8))
        return cls(
            source=source,
            rank=rank,
            alpha=_number(f"{source} lora_alpha", config.get("lora_alpha", 8)),
            target=_names(f"{source} target_modules", config.get("target_modules"), needed=True),
            excluded=_names(f"{source} exclude_modules", config.get("exclude_modules")),
            layers=_layers(source, config.get("layers_to_transform")),
            layers_pattern=_layers_pattern(source, config.get("layers_pattern")),
            rank_pattern=_pattern(source, "rank_pattern", config, _rank),
            alpha_pattern=_pattern(source, "alpha_pattern", config, _number),
            rslora=_flag(source, "use_rslora", config),
        )

    def rank_of(self, module: str) -> int:
        """The columns of a module's B."""
        return self._by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What a module's B A x is multiplied by."""
        rank = self.rank_of(module)
        alpha = self._by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (rank**0.5 if self.rslora else rank)

    def adapts(self, module: str) -> bool:
        """Whether the file says that a linear of the base model is adapted."""
        if _matches(self.excluded, module, f"{self.source} exclude_modules"):
            return False
        if isinstance(self.target, str) and self.target.lower() == ALL_LINEAR:
            return True
        if not _matches(self.target, module, f"{self.source} target_modules"):
            return False
        # PEFT lets these choose among names alone, not where there is an expression.
        if self.layers is None or isinstance(self.target, str) or module in self.target:
            return True
        return self._layer_of(module) in self.layers

    def _layer_of(self, module: str) -> int | None:
        """The first number in a name, behind the name of a list of layers."""
        parts = module.split(".")
        for before, part in zip(parts, parts[1:-1], strict=False):
            if part.isdecimal() and (not self.layers_pattern or before in self.layers_pattern):
                return int(part)
        return None

    def _by_pattern(self, patterns: Mapping[str, Any], module: str, default: Any) -> Any:
        for key, value in patterns.items():
            if regex(rf"(.*\.)?({key})$", self.source).matches(module):
                return value
        return default


def _matches(names: str | tuple[str, ...], module: str, subject: str) -> bool:
    if isinstance(names, str):
        return bool(names) and regex(f"({names})$", subject).matches(module)
    return module in names or any(module.endswith(f".{name}") for name in names)


def _check_refused(config: Mapping[str, Any], source: str) -> None:
    """Raise CheckpointError for a key that changes what is computed, and for an unknown one."""
    for key, value in config.items():
        if key in IGNORED or key in READ or value in (None, False, "none") or value in ([], {}, ""):
            continue
        what = REFUSED.get(key)
        problem = f"found {value!r:.100}: {what}" if what else f"unknown, found {value!r:.100}"
        raise CheckpointError(f"{source} {key}", f"{problem}; not supported", MERGE)
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING_INITS):
        raise CheckpointError(
            f"{source} init_lora_weights",
            f"found {init!r:.100}, which changed the base model's weights",
            "save it with PEFT's path_initial_model_for_weight_conversion",
        )


def _rank(subject: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise CheckpointError(subject, f"expected 1 to {MAX_RANK}, found {value!r:.100}")
    return value


def _number(subject: str, value: Any) -> float:
    if type(value) not in (int, float) or not isfinite(value):
        raise CheckpointError(subject, f"expected a number, found {value!r:.100}")
    return float(value)


def _flag(source: str, key: str, config: Mapping[str, Any]) -> bool:
    value = config.get(key, False)
    if type(value) is not bool and value is not None:
        raise CheckpointError(f"{source} {key}", f"expected true or false, found {value!r:.100}")
    return bool(value)


def _names(subject: str, value: Any, needed: bool = False) -> str | tuple[str, ...]:
    if value is None and not needed:
        return ()
    if isinstance(value, str) and value:
        return value
    is_list = isinstance(value, list) and all(isinstance(name, str) and name for name in value)
    if is_list and (value or not needed):
        return tuple(value)
    raise CheckpointError(subject, f"expected names or an expression, found {value!r:.100}")


def _layers(source: str, value: Any) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    numbers = value if isinstance(value, list) else [value]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise CheckpointError(
            f"{source} layers_to_transform", f"expected numbers of layers, found {value!r:.100}"
        )
    return frozenset(numbers)


def _layers_pattern(source: str, value: Any) -> tuple[str, ...]:
    names = _names(f"{source} layers_pattern", value or None)
    names = (names,) if isinstance(names, str) else names
    for name in names:
        if not name.replace("_", "a").isalnum():
            raise CheckpointError(
                f"{source} layers_pattern", f"expected the name of a list, found {name!r:.100}"
            )
    return names


def _pattern(source: str, key: str, config: Mapping[str, Any], check: Any) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} {key}", f"expected an object, found {value!r:.100}")
    return {name: check(f"{source} {key} {name!r:.100}", each) for name, each in value.items()}
