"""config.json of a draft head, in the published layouts of EAGLE-3, EAGLE and Medusa.

"original" is flat: a Llama config with `draft_vocab_size` (SafeAILab, SpecForge). "speculators" is
nested: the layers' config is below `transformer_layer_config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from formats.errors import CheckpointError

EAGLE3, EAGLE, MEDUSA = "eagle3", "eagle", "medusa"
ORIGINAL, SPECULATORS = "original", "speculators"
NUM_TAPS = 3
NESTED, KIND_KEY = "transformer_layer_config", "speculators_model_type"
TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
IMAGES_KEY = "image_embeddings"
ROPE_KEYS = ("rope_parameters", "rope_scaling")
# Heads of AngelSlim, which saw an image as embeddings of its placeholder token.
PLACEHOLDER_ARCHITECTURE = "Eagle3LlamaForCausalLM"
LAYER_TYPES = ("llama", "qwen2", "qwen3", "mistral")  # Llama's layers, some with QK norms


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """An EAGLE or EAGLE-3 head: the sizes of its layers, and the target's states that they read."""

    kind: Literal["eagle3", "eagle"]
    layout: Literal["original", "speculators"]
    values: Mapping[str, Any]  # config of the layers, in the keys of a Llama model
    target_hidden_size: int
    draft_vocab_size: int
    num_taps: int  # auxiliary hidden states of the target per token; EAGLE: 1
    stated_taps: tuple[int, ...]  # layer ids as config.json counts them; empty: not stated
    norm_before_residual: bool
    norm_output: bool  # the state fed to the next step is the normed one
    norm_before_fc: bool  # one norm over all auxiliary hidden states
    fc_norm: bool  # a norm for each auxiliary hidden state
    # trained with the embeddings of images instead of their placeholder token's; None: not stated
    image_embeddings: bool | None = None

    @property
    def hidden_size(self) -> int:
        return self.values["hidden_size"]

    @property
    def vocab_size(self) -> int:
        return self.values["vocab_size"]

    @property
    def intermediate_size(self) -> int:
        return self.values["intermediate_size"]

    @property
    def num_layers(self) -> int:
        return self.values.get("num_hidden_layers", 1)

    @property
    def num_heads(self) -> int:
        return self.values["num_attention_heads"]

    @property
    def num_kv_heads(self) -> int:
        return self.values.get("num_key_value_heads") or self.num_heads

    @property
    def head_dim(self) -> int:
        return self.values.get("head_dim") or self.hidden_size // self.num_heads

    @property
    def norm_eps(self) -> float:
        return self.values.get("rms_norm_eps", 1e-6)

    @property
    def reads_images(self) -> bool:
        """True if the head was trained with the embeddings of images.

        Where config.json does not say it, heads of speculators and AngelSlim were not; those that
        SGLang serves were, and it gives embeddings of images to all of them.
        """
        if self.image_embeddings is not None:
            return self.image_embeddings
        of_angelslim = PLACEHOLDER_ARCHITECTURE in (self.values.get("architectures") or ())
        return self.layout == ORIGINAL and not of_angelslim

    @property
    def axis_pairs(self) -> tuple[int, ...]:
        """Number of pairs of channels of each axis of a position (M-RoPE); (): positions are
        numbers.
        """
        return tuple(_axes(self.values).get("mrope_section") or ())

    @property
    def has_interleaved_axes(self) -> bool:
        return bool(_axes(self.values).get("mrope_interleaved"))

    def taps(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the auxiliary hidden states that the head reads, as numbers of layers before them.

        A flat config uses SGLang's ids, which name the layer whose output the state is: one less.
        If the ids equal the usual ones, they are already counted as here and are taken unchanged.
        Raises CheckpointError for states that the target does not have.
        """
        if self.kind == EAGLE:
            return ()
        usual = usual_taps(num_target_layers)
        taps = self.stated_taps or usual
        if self.stated_taps and self.layout == ORIGINAL and taps != usual:
            taps = tuple(tap + 1 for tap in taps)
        if not all(0 <= tap <= num_target_layers for tap in taps) or len(taps) != self.num_taps:
            raise CheckpointError(
                f"config.json {TAPS_KEY}",
                f"expected {self.num_taps} states of a target of {num_target_layers} layers, found"
                f" {list(taps)}",
                "is this the model that the head was trained for?",
            )
        return taps


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Medusa's heads: each a few residual blocks and an output matrix on the last state."""

    num_heads: int
    num_layers: int  # residual blocks per head
    kind: Literal["medusa"] = "medusa"


HeadConfig = EagleConfig | MedusaConfig


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """Return EAGLE-3's default auxiliary hidden states, as numbers of layers before them."""
    return (2, num_layers // 2, num_layers - 3)


def head_kind(config: Mapping[str, Any]) -> str | None:
    """Return the kind of draft head that a config.json states, or None."""
    if KIND_KEY in config:
        return str(config[KIND_KEY])
    names = config.get("architectures")
    names = " ".join(map(str, names)).lower() if isinstance(names, list) else ""
    if "medusa_num_heads" in config:
        return MEDUSA
    if "eagle3" in names or "draft_vocab_size" in config:
        return EAGLE3
    return EAGLE if "eagle" in names else None


def read_head_config(config: Mapping[str, Any], kind: str) -> HeadConfig:
    """Read the config.json of a head. Raises CheckpointError, naming the key."""
    if kind == MEDUSA:
        return MedusaConfig(
            num_heads=_whole(config, "medusa_num_heads", 5),
            num_layers=_whole(config, "medusa_num_layers", 1),
        )
    if kind not in (EAGLE3, EAGLE):
        raise CheckpointError(
            f"config.json {KIND_KEY}", f"expected {EAGLE3}, found {kind!r}", "use another head"
        )
    nested = config.get(NESTED)
    layout = SPECULATORS if KIND_KEY in config else ORIGINAL
    if layout == SPECULATORS and not isinstance(nested, dict):
        raise CheckpointError(f"config.json {NESTED}", f"expected an object, found {nested!r:.80}")
    values = dict(nested) if layout == SPECULATORS else dict(config)
    values.setdefault("num_hidden_layers", 1)
    values.setdefault("model_type", "llama")
    if values["model_type"] not in LAYER_TYPES:
        raise CheckpointError(
            "config.json model_type",
            f"expected a head of {', '.join(LAYER_TYPES)} layers, found {values['model_type']!r}",
        )
    for key in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        _whole(values, key)
    for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"):
        if values.get(key) is not None:
            _whole(values, key)
    if values.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            "config.json hidden_act", f"expected 'silu', found {values['hidden_act']!r}"
        )
    sections = _axes(values).get("mrope_section", [])
    if not isinstance(sections, list) or not all(type(each) is int for each in sections):
        raise CheckpointError(
            "config.json mrope_section", f"expected three numbers, found {sections!r:.80}"
        )
    inner = config.get("eagle_config")
    stated = {**(inner if isinstance(inner, dict) else {}), **config}
    if kind == EAGLE and layout == SPECULATORS:
        raise CheckpointError(
            f"config.json {KIND_KEY}", "EAGLE is read only in its original layout, found eagle"
        )
    taps = _taps(stated)
    num_taps = len(taps) or NUM_TAPS
    if stated.get("num_aux_hidden_states") is not None:
        num_taps = _whole(stated, "num_aux_hidden_states")
    return EagleConfig(
        kind=kind,
        layout=layout,
        values=values,
        target_hidden_size=_whole(stated, "target_hidden_size", values["hidden_size"]),
        draft_vocab_size=_whole(stated, "draft_vocab_size", values["vocab_size"]),
        num_taps=1 if kind == EAGLE else num_taps,
        stated_taps=taps,
        # speculators did not write the key before it was a choice; its heads of that time norm
        norm_before_residual=_flag(stated, "norm_before_residual", layout == SPECULATORS),
        norm_output=_flag(stated, "norm_output", False),
        norm_before_fc=_flag(stated, "norm_before_fc", False),
        fc_norm=_flag(stated, "fc_norm", False),
        image_embeddings=None
        if stated.get(IMAGES_KEY) is None
        else _flag(stated, IMAGES_KEY, False),
    )


def _axes(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rope parameters that have the axes of positions, or {}."""
    ropes = [values.get(key) for key in ROPE_KEYS]
    found = [each for each in ropes if isinstance(each, Mapping) and each.get("mrope_section")]
    return found[0] if found else {}


def _taps(config: Mapping[str, Any]) -> tuple[int, ...]:
    found = config.get(TAPS_KEY) or []
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        raise CheckpointError(f"config.json {TAPS_KEY}", f"expected numbers, found {found!r:.80}")
    return tuple(found)


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"config.json {key}", f"expected a number of 1 or more, found {value!r:.80}"
        )
    return value


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not bool:
        raise CheckpointError(f"config.json {key}", f"expected true or false, found {value!r:.80}")
    return value
