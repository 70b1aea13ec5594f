"""adapter_config.json of a PEFT LoRA folder: adapted modules, their ranks and their factors.

Every key is read, refused by name, or known to have no effect.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from formats.errors import CheckpointError
from formats.files.json_file import fits_float32, read_json
from formats.patterns import StepBudget, regex

ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
# stacks of experts that may be adapted, in the order of their module
PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
MAX_RANK = 1024  # far above ranks in use
# PEFT writes the full name of each linear if ranks differ: 880 for 126 layers.
MAX_CONFIG_BYTES = 1_000_000
MAX_NAMES = 4096  # names in one key
MAX_NAME_CHARS = 500
MAX_EXPRESSIONS = 256  # expressions in one key; plain names do not count
SAVE_AGAIN = "save the adapter again with PEFT"
MERGE = "merge it into the float model with PEFT's merge_and_unload, and quantize that"

# Keys without effect on what a trained adapter computes.
IGNORED = {
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"),
    *("task_type", "lora_dropout", "megatron_core", "runtime_config", "qalora_group_size"),
    *("ensure_weight_tying", "eva_config", "lora_ga_config", "corda_config", "loftq_config"),
}
READ = {
    *("peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern"),
    *("alpha_pattern", "use_rslora", "layers_to_transform", "layers_pattern"),
    *("init_lora_weights", "target_parameters"),
}
# keys that change the arithmetic or the base model -> what they do
REFUSED = {
    "use_dora": "DoRA scales the merged weight's columns",
    "modules_to_save": "whole modules that replace the base model's",
    "bias": "trained biases",
    "lora_bias": "biases of lora_B",
    "fan_in_fan_out": "weights of Conv1D, which are transposed",
    "layer_replication": "layers that occur in the model several times",
    "trainable_token_indices": "new rows of the embedding",
    "alora_invocation_tokens": "an adapter that begins within the prompt (aLoRA)",
    "use_qalora": "QA-LoRA pools the inputs of a group",
    "use_bdlora": "block-diagonal matrices",
    "megatron_config": "Megatron's parallel layers",
}
# Initializations that subtract the product of A and B from the base model's weights.
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Content of an adapter_config.json. Modules are named as in the base checkpoint."""

    source: str  # the file, for errors
    rank: int
    alpha: float
    target: str | tuple[str, ...]  # a regular expression of whole names, or suffixes of names
    parameters: tuple[str, ...]  # suffixes of names of stacked experts (target_parameters)
    excluded: str | tuple[str, ...]
    layers: frozenset[int] | None  # numbers of the adapted layers; None: all
    layers_pattern: tuple[str, ...]  # names of lists of layers; (): any
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rslora: bool
    _budget: StepBudget = field(repr=False, compare=False)
    _found: dict[str, tuple[int, float]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "LoraConfig":
        """Read and check the whole file. Raises CheckpointError."""
        path = Path(folder) / ADAPTER_CONFIG
        if not path.is_file():
            raise CheckpointError(
                str(folder), f"has no {ADAPTER_CONFIG}", "give a folder that PEFT has saved"
            )
        return cls.from_dict(read_json(path, MAX_CONFIG_BYTES), str(path))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], source: str = ADAPTER_CONFIG) -> "LoraConfig":
        """Check and read the parsed file. Raises CheckpointError."""
        if config.get("peft_type") != "LORA":
            raise CheckpointError(
                f"{source} peft_type",
                f"expected 'LORA', found {config.get('peft_type')!r:.100}",
                MERGE,
            )
        _check_refused(config, source)
        rank = _rank(f"{source} r", config.get("r", 8))
        parameters = _parameters(source, config.get("target_parameters"))
        targets = config.get("target_modules")
        return cls(
            source=source,
            rank=rank,
            alpha=_number(f"{source} lora_alpha", config.get("lora_alpha", 8)),
            target=_names(f"{source} target_modules", targets, needed=not parameters),
            parameters=parameters,
            excluded=_names(f"{source} exclude_modules", config.get("exclude_modules")),
            layers=_layers(source, config.get("layers_to_transform")),
            layers_pattern=_layers_pattern(source, config.get("layers_pattern")),
            rank_pattern=_pattern(source, "rank_pattern", config, _rank),
            alpha_pattern=_pattern(source, "alpha_pattern", config, _number),
            rslora=_flag(source, "use_rslora", config),
            _budget=StepBudget(source),
        )

    def rank_of(self, module: str) -> int:
        """Return the rank of a module (the columns of B)."""
        return self._rank_and_alpha(module)[0]

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's B A x."""
        rank, alpha = self._rank_and_alpha(module)
        return alpha / (rank**0.5 if self.rslora else rank)

    def adapts(self, module: str) -> bool:
        """Return True if the file says that a linear of the base model is adapted."""
        if self._matches(self.excluded, module, "exclude_modules"):
            return False
        if isinstance(self.target, str) and self.target.lower() == ALL_LINEAR:
            return True
        if not self._matches(self.target, module, "target_modules"):
            return False
        # PEFT applies `layers` and its pattern to lists of names, not to an expression.
        if self.layers is None or isinstance(self.target, str) or module in self.target:
            return True
        return self._layer_of(module) in self.layers

    def adapts_parameter(self, name: str) -> bool:
        """Return True if the file says that a stack of experts is adapted."""
        return any(name == each or name.endswith(f".{each}") for each in self.parameters)

    def _layer_of(self, module: str) -> int | None:
        """Return the layer of a module: the first number after the name of a list of layers."""
        parts = module.split(".")
        for before, part in zip(parts, parts[1:-1], strict=False):
            if part.isdecimal() and (not self.layers_pattern or before in self.layers_pattern):
                return int(part)
        return None

    def _rank_and_alpha(self, module: str) -> tuple[int, float]:
        found = self._found.get(module)
        if found is None:
            found = self._found[module] = (
                self._by_pattern(self.rank_pattern, module, self.rank),
                self._by_pattern(self.alpha_pattern, module, self.alpha),
            )
        return found

    def _by_pattern(self, patterns: Mapping[str, Any], module: str, default: Any) -> Any:
        for key, value in patterns.items():
            if _is_plain(key):
                if _ends_with(module, key):
                    return value
            elif regex(rf"(.*\.)?({key})$", self.source).matches(module, self._budget):
                return value
        return default

    def _matches(self, names: str | tuple[str, ...], module: str, key: str) -> bool:
        if isinstance(names, str):
            pattern = regex(f"({names})$", f"{self.source} {key}")
            return bool(names) and pattern.matches(module, self._budget)
        return module in names or any(module.endswith(f".{name}") for name in names)


def _is_plain(key: str) -> bool:
    """Return True if a pattern is a plain name, whose dots match any character."""
    return key.replace(".", "").replace("_", "").isalnum()


def _ends_with(module: str, name: str) -> bool:
    """Return True if `(.*\\.)?(name)$` matches a module, without a regular expression."""
    start = len(module) - len(name)
    if start < 0 or (start and module[start - 1] != "."):
        return False
    return module.endswith(name) or all(
        there in (".", here) for there, here in zip(name, module[start:], strict=True)
    )


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
        raise CheckpointError(
            subject,
            f"expected 1 to {MAX_RANK}, found {value!r:.100}",
            f"train an adapter of rank {MAX_RANK} or less, or {MERGE}",
        )
    return value


def _number(subject: str, value: Any) -> float:
    if type(value) not in (int, float) or not fits_float32(value):
        found = f"{value!r:.100}" if type(value) is not int else f"{len(str(value))} digits"
        raise CheckpointError(
            subject, f"expected a number within float32, found {found}", SAVE_AGAIN
        )
    return float(value)


def _flag(source: str, key: str, config: Mapping[str, Any]) -> bool:
    value = config.get(key, False)
    if type(value) is not bool and value is not None:
        raise CheckpointError(
            f"{source} {key}", f"expected true or false, found {value!r:.100}", SAVE_AGAIN
        )
    return bool(value)


def _names(subject: str, value: Any, needed: bool = False) -> str | tuple[str, ...]:
    if value is None and not needed:
        return ()
    if isinstance(value, str) and value:
        return value
    is_list = isinstance(value, list) and all(isinstance(name, str) and name for name in value)
    if is_list and (value or not needed):
        _check_names(subject, value)
        return tuple(value)
    raise CheckpointError(
        subject, f"expected names or an expression, found {value!r:.100}", SAVE_AGAIN
    )


def _parameters(source: str, value: Any) -> tuple[str, ...]:
    names = _names(f"{source} target_parameters", value or None)
    names = (names,) if isinstance(names, str) else names
    for name in names:
        if name.rpartition(".")[2] not in PARAMETERS:
            raise CheckpointError(
                f"{source} target_parameters",
                f"expected {', '.join(PARAMETERS)} of experts, found {name!r:.100}; not supported",
                MERGE,
            )
    return names


def _layers(source: str, value: Any) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    numbers = value if isinstance(value, list) else [value]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise CheckpointError(
            f"{source} layers_to_transform",
            f"expected numbers of layers, found {value!r:.100}",
            SAVE_AGAIN,
        )
    return frozenset(numbers)


def _layers_pattern(source: str, value: Any) -> tuple[str, ...]:
    names = _names(f"{source} layers_pattern", value or None)
    names = (names,) if isinstance(names, str) else names
    for name in names:
        if not name.replace("_", "a").isalnum():
            raise CheckpointError(
                f"{source} layers_pattern",
                f"expected the name of a list, found {name!r:.100}",
                SAVE_AGAIN,
            )
    return names


def _pattern(source: str, key: str, config: Mapping[str, Any], check: Any) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{source} {key}", f"expected an object, found {value!r:.100}", SAVE_AGAIN
        )
    _check_names(f"{source} {key}", value)
    num_expressions = sum(not _is_plain(name) for name in value)
    if num_expressions > MAX_EXPRESSIONS:
        problem = f"expected at most {MAX_EXPRESSIONS} expressions, found {num_expressions}"
        raise CheckpointError(f"{source} {key}", problem, "use the names of modules")
    return {name: check(f"{source} {key} {name!r:.100}", each) for name, each in value.items()}


def _check_names(subject: str, names: Collection[str]) -> None:
    """Raise CheckpointError if names are more or longer than any model needs."""
    if len(names) > MAX_NAMES:
        raise CheckpointError(
            subject,
            f"expected at most {MAX_NAMES}, found {len(names)}",
            "use an expression or shorter names in place of the list",
        )
    longest = max(names, key=len, default="")
    if len(longest) > MAX_NAME_CHARS:
        raise CheckpointError(
            subject,
            f"expected names of at most {MAX_NAME_CHARS} characters, found one of {len(longest)}",
            "use an expression or shorter names in place of the list",
        )
