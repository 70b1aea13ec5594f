"""ModelConfig: config.json in the form that the model needs, with transformers' defaults."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from formats.architecture.bare_model import INSTEAD_OF_HEAD, RANKER, SCORE, is_headless
from formats.architecture.family import Family
from formats.architecture.flags import is_set
from formats.architecture.refused import check_not_refused
from formats.architecture.sizes import check_eps, check_factors, check_heads
from formats.architecture.stored_form.config import canonical_config
from formats.architecture.text_part import HEAD_WEIGHT, OUTPUT_WINDOW, has_text_part, text_config
from formats.architecture.tied_head import says_tied
from formats.architecture.variant_check import check_counts, check_variant
from formats.checkpoint import CONFIG, INDEX, SINGLE, CheckpointReader, read_json
from formats.codecs import mxfp4
from formats.errors import COPY_CONFIG, InputError, one_line
from formats.families import FAMILIES, served_architectures
from formats.files.model_path import MISTRAL_INDEX, model_folder, origin
from formats.quant_config import BLOCK, QuantConfig, find_block
from formats.scheme import Scheme
from qserve.model.context_length import ContextLength
from qserve.model.fallback import support
from qserve.model.fallback.config import fallback_fields
from qserve.model.filled_config import filled_config
from qserve.model.loading.online_quantization import OnlineQuantization, RoundingPlan
from qserve.model.rope import RopeConfig
from qserve.multimodal.families import VisionConfig

# Limit for a wrong config.json, since tables of this width are made before tensors are read. The
# largest known head size is 576.
MAX_HEAD_DIM = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and options of one decoder."""

    family: Family
    values: Mapping[str, Any]  # contents of config.json, with transformers' defaults
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # head size of o_proj's input
    norm_eps: float
    activation: str  # name in config.json
    ropes: tuple[RopeConfig | None, ...]  # per layer; None: no rotary embedding
    context: ContextLength
    tied_head: bool
    windows: tuple[int | None, ...]  # per layer: number of keys that a query attends to, incl. own
    # per layer: True for a recurrent state instead of keys and values
    state_layers: tuple[bool, ...]
    dtype: torch.dtype  # from the checkpoint
    quant: QuantConfig | None  # None: float linears
    eos_token_ids: frozenset[int]
    instead_of_head: str = ""  # name of a matrix that replaces the head, such as a classifier's
    labels: tuple[str, ...] = ()  # labels of a classifier
    # number of the output's tokens that queries attend to, besides the prompt; 0: all
    output_window: int = 0
    # kinds of media (qserve.multimodal.settings.KINDS) that the model can encode
    media_kinds: frozenset[str] = frozenset()
    vision: VisionConfig | None = None  # config of the whole model, if its vision tower is used
    no_vision: str = ""  # remedy if the vision tower is not used
    # True: gpt-oss's experts are in MXFP4, which `quant` does not describe
    mxfp4_experts: bool = False
    # set for a float checkpoint that is quantized while it loads; `quant` describes the result
    rounding: RoundingPlan | None = None
    # scheme to which a float head is rounded while it loads; None: it stays in float
    head_scheme: Scheme | None = None

    def check_length(self, max_model_len: int) -> None:
        """Raise InputError if the rope of a layer does not support `max_model_len` positions."""
        for rope in self.ropes:
            if rope is not None:
                rope.check_length(max_model_len)

    def of_layer(self, layer: int) -> "ModelConfig":
        """Return the config with the family row and the heads of one layer."""
        values = self.values
        heads, kv_heads = self.family.heads_of_layer(layer, values)
        is_full = self.family.kind_of_layer(layer, values).full
        return replace(
            self,
            family=self.family.of_layer(layer, values),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=values["global_head_dim"] if is_full else self.head_dim,
        )

    def limit(self, key: str, layer: int) -> float | None:
        """Return a layer's limit of the activation, which `key` lists; None: it has none.

        Raises InputError for what is no limit.
        """
        stated = self.values.get(key) or []
        if not isinstance(stated, list) or layer >= len(stated):
            stated = [None] * (layer + 1)
        found = stated[layer] or None
        if found is not None and not (type(found) in (int, float) and 0 < found < math.inf):
            raise InputError(
                f"config.json {key}",
                f"expected numbers from 0 on, or null, found {found!r:.80} for layer {layer}",
                "copy it from the float model",
            )
        return found and float(found)

    def mlp_activation(self, layer: int) -> dict[str, Any]:
        """Return the activation of a layer's dense feed-forward as arguments of Mlp."""
        experts = self.family.experts
        if experts is not None and experts.clamped:
            alpha, limit = experts.alpha_and_limit(self.values)
            return {"activation": "swiglu_oai", "alpha": alpha, "limit": limit}
        limit = self.limit(self.family.limits_key, layer)
        limits_gates = experts is not None and experts.limits_gates
        return {"activation": self.activation, "limit": limit, "limits_gates": limits_gates}

    @property
    def has_states(self) -> bool:
        """True if some layers have recurrent states."""
        return any(self.state_layers)

    @property
    def has_attention(self) -> bool:
        """True if some layers have attention, and therefore keys and values in pages."""
        return any(self.family.blocks(self.values, n).attention for n in range(self.num_layers))

    @property
    def longest_window(self) -> int | None:
        """Largest window of all layers; None: a layer has no window."""
        return None if None in self.windows else max(self.windows)

    @property
    def sizes(self) -> dict[str, int | None]:
        """Values of the sizes that shapes in the family's row refer to."""
        return self.family.sizes({**self.values, "head_dim": self.head_dim})

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        activation_bits: int | None = None,
        is_drafter: bool = False,
        quantization: OnlineQuantization | None = None,
        implementation: str = support.AUTO,
    ) -> "ModelConfig":
        """Read config.json and generation_config.json. Raises InputError.

        `activation_bits`: bits of activations for a checkpoint made for 4-bit activations; None:
        such a checkpoint is refused. With `is_drafter`, other checkpoints ignore it.
        `quantization`: schemes to which a float checkpoint is quantized while it loads.
        `implementation`: implementation of the layers, as in EngineConfig.model_impl.
        """
        folder = model_folder(folder)
        raw = read_json(folder / CONFIG)
        # Only the tensors show whether there is a head, and whether it is the embedding.
        may_lack_head = (
            is_headless(canonical_config(raw)) or (Path(folder) / "modules.json").exists()
        )
        has_tensors = any((Path(folder) / name).exists() for name in (SINGLE, INDEX, MISTRAL_INDEX))
        vision = None
        if has_text_part(raw) and not has_tensors:  # a folder without weights: dummy weights
            vision = VisionConfig.of(raw)
            raw = text_config(raw, () if says_tied(raw) else (HEAD_WEIGHT,))
        elif has_text_part(raw) or may_lack_head or (says_tied(raw) and has_tensors):
            reader = CheckpointReader(folder)
            raw = reader.config
            vision = VisionConfig.of(reader.whole_config) if reader.other_parts else None
        raw = canonical_config(raw)
        check_counts(raw)
        block = find_block(Path(folder), raw)
        if support.is_chosen(raw, implementation):
            if quantization is not None:
                raise InputError(
                    "--quantization",
                    "does not work with a model that runs through transformers",
                    "quantize the model first",
                )
            quant = QuantConfig.from_dict(block) if block else None
            fields = fallback_fields(raw, quant, Path(folder))
            tokens = _eos_token_ids(Path(folder), SimpleNamespace(**fields["values"]))
            return cls(**fields, eos_token_ids=tokens)
        stated = block or raw.get(BLOCK)
        if quantization is not None and stated is not None:
            method = stated.get("quant_method") if isinstance(stated, dict) else stated
            quantization.check_method(str(origin(folder)), method)
            quantization = None
        family = family_of(raw)
        try:
            # The block is removed: otherwise transformers looks for the library that wrote it.
            plain = {key: value for key, value in raw.items() if key != BLOCK}
            config = SimpleNamespace(**canonical_config(filled_config(plain, family.defaults_of)))
        except Exception as error:  # config classes do not document their exceptions
            problem = f"transformers rejects it: {one_line(error)}"
            raise InputError(f"{folder}/{CONFIG}", problem, COPY_CONFIG) from None
        try:
            quant = QuantConfig.from_dict(block) if block else None
            if quant is not None:
                quant = quant.with_activation_bits(activation_bits, may_be_unused=is_drafter)
            model = cls._from_config(family, config, raw, quant, Path(folder))
            if isinstance(stated, dict) and stated.get("quant_method") == mxfp4.METHOD:
                model = replace(model, mxfp4_experts=True)
            if vision is not None:
                model = replace(model, vision=vision, media_kinds=vision.family.kinds)
            if quantization is None:
                return model
            plan = quantization.plan(family, model.values, model.sizes, str(folder))
            return replace(model, quant=plan.config, rounding=plan)
        except InputError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"cannot be used: {type(error).__name__}: {one_line(error)}"
            raise InputError(f"{folder}/{CONFIG}", problem, COPY_CONFIG) from None

    @classmethod
    def _from_config(
        cls,
        family: Family,
        config: Any,
        raw: Mapping[str, Any],
        quant: QuantConfig | None,
        folder: Path,
    ) -> "ModelConfig":
        """Create the ModelConfig from transformers' `config` and the contents of config.json."""
        check_variant(family, raw)
        activation = family.activations[0]
        if family.activation_key:
            activation = getattr(config, family.activation_key)
        if activation not in family.activations:
            raise InputError(
                f"config.json {family.activation_key}",
                f"expected {' or '.join(map(repr, family.activations))}, found {activation!r}",
                COPY_CONFIG,
            )
        head_dim = getattr(config, "v_head_dim" if family.latent else "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        rotated = config.qk_rope_head_dim if family.latent else head_dim
        if not 1 <= head_dim <= MAX_HEAD_DIM:
            raise InputError(
                "config.json head_dim",
                f"expected 1 to {MAX_HEAD_DIM}, found {head_dim}",
                "copy it from the float model",
            )
        if family.norm_eps_key:
            check_eps(family.norm_eps_key, family.norm_eps(vars(config)))
        num_kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        check_heads(config.num_attention_heads, num_kv_heads)
        applied = (family.embedding_factor_key, family.logits_divisor_key, family.logits_factor_key)
        check_factors(vars(config), applied)
        windows = _windows(config, family.window)
        ropes = _ropes(config, family, rotated, windows)
        return cls(
            family=family,
            values=vars(config),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, family.inner_key),
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=family.norm_eps(vars(config)),
            activation=activation,
            ropes=ropes,
            context=ContextLength.of(raw, config.max_position_embeddings, ropes),
            tied_head=bool(config.tie_word_embeddings),
            windows=windows,
            state_layers=tuple(
                family.has_state(number, vars(config)) for number in range(config.num_hidden_layers)
            ),
            dtype=_dtype(config.dtype),
            quant=quant,
            eos_token_ids=_eos_token_ids(folder, config),
            instead_of_head=raw.get(INSTEAD_OF_HEAD, ""),
            labels=_labels(config, raw.get(INSTEAD_OF_HEAD)),
            output_window=raw.get(OUTPUT_WINDOW, 0),
        )


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family row for config.json. Raises InputError if the model is not supported."""
    names, served = config.get("architectures"), served_architectures()
    for name in served:
        if names == [name]:
            return FAMILIES[name].variant(config)
    check_not_refused(config)
    raise InputError(
        "config.json architectures",
        f"expected one of {len(served)} served architectures, found {names!r:.200}",
        "`qserve families` lists them",
    )


def _labels(config: Any, instead_of_head: str | None) -> tuple[str, ...]:
    """Return the labels of a classifier, in the order of its rows; () if the model is none."""
    if instead_of_head == RANKER:
        return ("score",)
    if instead_of_head != SCORE:
        return ()
    named = getattr(config, "id2label", None) or {}
    return tuple(str(named[key]) for key in sorted(named, key=int))


def _dtype(name: str | None) -> torch.dtype:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def _windows(config: Any, kind: str) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if kind == "all":
        return (window,) * config.num_hidden_layers
    if kind == "layer_types":
        kinds = ("sliding_attention", "hybrid_sliding")  # the second is Inkling's
        return tuple(window if t in kinds else None for t in config.layer_types)
    return (None,) * config.num_hidden_layers


def _ropes(
    config: Any, family: Family, head_dim: int, windows: tuple[int | None, ...]
) -> tuple[RopeConfig | None, ...]:
    """Return the rope of each layer. transformers has one for all layers or one per layer type."""
    if not family.rotates(vars(config)):
        return (None,) * len(windows)
    if family.rotary_dim_key:
        rotated = getattr(config, family.rotary_dim_key) / head_dim
        stated = {"rope_theta": 10000.0, "partial_rotary_factor": rotated}
    else:
        stated = config.rope_parameters
    by_type = stated if any(isinstance(value, dict) for value in stated.values()) else None
    ropes = []
    for number, window in enumerate(windows):
        if family.rope == "no_rope_layers":
            rotates = bool(config.no_rope_layers[number])  # 1 means that the layer does rotate
        else:
            in_all = family.rope != "windows" or config.sliding_window is None
            rotates = in_all or window is not None
        kind = config.layer_types[number] if by_type else ""
        parameters = by_type.get(family.rope_keys.get(kind, kind)) if by_type else stated
        if parameters is None:  # a layer without attention
            ropes.append(None)
            continue
        if family.theta_key:
            theta = getattr(config, family.theta_key)[number]
            rotates, parameters = bool(theta), {**parameters, "rope_theta": theta or 1.0}
        if family.latent:  # all channels of the rotated part are rotated
            parameters = {**parameters, "partial_rotary_factor": 1.0}
        is_full = family.kind_of_layer(number, vars(config)).full
        rope = RopeConfig.from_dict(
            parameters,
            dim=config.global_head_dim if is_full and not family.latent else head_dim,
            max_position=config.max_position_embeddings,
            interleaved=is_set(family.interleaved_rope, vars(config)),
            is_reversed=family.reversed_rope,
        )
        ropes.append(rope if rotates else None)
    return tuple(ropes)


def _eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    """Return the end tokens of generation_config.json, which chat models need, and config.json.

    Some models list -1 or ids beyond the vocabulary; these are left out. Raises InputError.
    """
    found: list[int] = []
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    for value in (generation.get("eos_token_id"), config.eos_token_id):
        if value is not None:
            found += value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in found):
        raise InputError(
            f"{folder} eos_token_id",
            f"expected token ids, found {found!r:.100}",
            "copy generation_config.json and config.json from the original model",
        )
    return frozenset(token for token in found if 0 <= token < config.vocab_size)
