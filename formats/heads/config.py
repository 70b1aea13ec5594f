"""config.json of a draft head, in the published layouts of EAGLE-3, P-EAGLE, EAGLE and Medusa.

"original" is flat: a Llama config with `draft_vocab_size` (SafeAILab, SpecForge). "speculators" is
nested: the layers' config is below `transformer_layer_config`. block_config.py reads the config of
heads that draft a block.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from formats.errors import CheckpointError
from formats.heads.block_config import DFLASH, DFLASH2, DSPARK, BlockConfig, read_block_config
from formats.heads.layers_config import (
    COPY_HEAD,
    KIND_KEY,
    ORIGINAL,
    SPECULATORS,
    LayersConfig,
    flag,
    layers_of,
    numbers,
    whole,
)

EAGLE3, PEAGLE, EAGLE, MEDUSA = "eagle3", "peagle", "eagle", "medusa"
NUM_AUX = 3
AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
# keys of the token of rows whose token is not known yet: speculators' key, then flat configs' keys
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
IMAGES_KEY = "image_embeddings"
ROPE_KEYS = ("rope_parameters", "rope_scaling")
# Heads of AngelSlim were trained with the placeholder token's embedding instead of an image's.
PLACEHOLDER_ARCHITECTURE = "Eagle3LlamaForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(LayersConfig):
    """An EAGLE, EAGLE-3 or P-EAGLE head: its layers, and the target's states that it reads."""

    kind: Literal["eagle3", "peagle", "eagle"]
    num_aux: int  # number of the target's auxiliary hidden states per token; EAGLE: 1
    explicit_aux_layers: tuple[int, ...]  # layer ids as config.json counts them; empty: not stated
    norm_before_residual: bool
    norm_output: bool  # the next step reads the state after the norm
    norm_before_fc: bool  # one norm over all auxiliary hidden states
    fc_norm: bool  # a norm for each auxiliary hidden state
    # trained with the embeddings of images, not of their placeholder token; None: not stated
    image_embeddings: bool | None = None
    mask_token_id: int = 0  # P-EAGLE: the token of rows whose token is not known yet

    @property
    def is_eagle3(self) -> bool:
        """True for the layers of EAGLE-3, which P-EAGLE also has."""
        return self.kind in (EAGLE3, PEAGLE)

    @property
    def reads_images(self) -> bool:
        """True if the head was trained with the embeddings of images.

        If config.json does not state it, it follows from the layout: heads of speculators and
        AngelSlim were trained without image embeddings, and heads for SGLang were trained with
        them.
        """
        if self.image_embeddings is not None:
            return self.image_embeddings
        of_angelslim = PLACEHOLDER_ARCHITECTURE in (self.values.get("architectures") or ())
        return self.layout == ORIGINAL and not of_angelslim

    @property
    def axis_pairs(self) -> tuple[int, ...]:
        """Number of channel pairs for each axis of a position (M-RoPE); (): no axes."""
        return tuple(_axes(self.values).get("mrope_section") or ())

    @property
    def has_interleaved_axes(self) -> bool:
        return bool(_axes(self.values).get("mrope_interleaved"))

    def aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the auxiliary hidden states that the head reads, as numbers of layers before them.

        A flat config uses SGLang's ids, which name the layer whose output the state is, so they are
        one less than these numbers. Ids that equal the default numbers are taken unchanged. Raises
        CheckpointError for states that the target does not have.
        """
        if self.kind == EAGLE:
            return ()
        default = default_aux_layers(num_target_layers)
        aux_layers = self.explicit_aux_layers or default
        if self.explicit_aux_layers and self.layout == ORIGINAL and aux_layers != default:
            aux_layers = tuple(layer + 1 for layer in aux_layers)
        is_in_target = all(0 <= layer <= num_target_layers for layer in aux_layers)
        if not is_in_target or len(aux_layers) != self.num_aux:
            raise CheckpointError(
                f"config.json {AUX_LAYERS_KEY}",
                f"expected {self.num_aux} auxiliary layers of a target model with"
                f" {num_target_layers} layers, found {list(aux_layers)}",
                "use the head with the model that it was trained for",
            )
        return aux_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Medusa's heads: each reads the last state through residual blocks and an output matrix."""

    num_heads: int
    num_layers: int  # residual blocks per head
    kind: Literal["medusa"] = "medusa"


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
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
    for kind in (DSPARK, DFLASH2, DFLASH):
        if kind in names:
            return kind
    if "dflash_config" in config:
        return DFLASH
    is_eagle3 = "eagle3" in names or "draft_vocab_size" in config
    if "peagle" in names or (is_eagle3 and any(config.get(key) is not None for key in MASK_KEYS)):
        return PEAGLE
    if is_eagle3:
        return EAGLE3
    return EAGLE if "eagle" in names else None


HeadConfig = EagleConfig | MedusaConfig | BlockConfig


def read_head_config(config: Mapping[str, Any], kind: str) -> HeadConfig:
    """Read the config.json of a head. Raises CheckpointError, naming the key."""
    if kind == MEDUSA:
        return MedusaConfig(
            num_heads=whole(config, "medusa_num_heads", 5),
            num_layers=whole(config, "medusa_num_layers", 1),
        )
    if kind in (DFLASH, DSPARK):
        return read_block_config(config, kind)
    if kind not in (EAGLE3, PEAGLE, EAGLE):
        known = ", ".join((EAGLE3, PEAGLE, EAGLE, MEDUSA, DFLASH, DSPARK))
        raise CheckpointError(
            f"config.json {KIND_KEY if KIND_KEY in config else 'architectures'}",
            f"expected a head of kind {known}, found {kind!r}",
            "use another head",
        )
    inner = config.get("eagle_config")
    stated = {**(inner if isinstance(inner, dict) else {}), **config}
    layers = layers_of(config, stated)
    sections = _axes(layers["values"]).get("mrope_section", [])
    if not isinstance(sections, list) or not all(type(each) is int for each in sections):
        raise CheckpointError(
            "config.json mrope_section",
            f"expected three numbers, found {sections!r:.80}",
            COPY_HEAD,
        )
    is_nested = layers["layout"] == SPECULATORS
    if kind == EAGLE and is_nested:
        raise CheckpointError(
            f"config.json {KIND_KEY}",
            "expected eagle3 or peagle, found eagle, which is supported only in its original"
            " layout",
            "use the head in its original layout, as its authors published it",
        )
    aux_layers = numbers(stated, AUX_LAYERS_KEY)
    num_aux = len(aux_layers) or NUM_AUX
    if stated.get("num_aux_hidden_states") is not None:
        num_aux = whole(stated, "num_aux_hidden_states")
    return EagleConfig(
        **layers,
        kind=kind,
        num_aux=1 if kind == EAGLE else num_aux,
        explicit_aux_layers=aux_layers,
        # Before this was a choice, speculators did not write the key; those heads have the norm.
        norm_before_residual=flag(stated, "norm_before_residual", is_nested and kind == EAGLE3),
        norm_output=flag(stated, "norm_output", False),
        norm_before_fc=flag(stated, "norm_before_fc", False),
        fc_norm=flag(stated, "fc_norm", False),
        image_embeddings=None
        if stated.get(IMAGES_KEY) is None
        else flag(stated, IMAGES_KEY, False),
        mask_token_id=_mask(stated) if kind == PEAGLE else 0,
    )


def _mask(config: Mapping[str, Any]) -> int:
    key = next((key for key in MASK_KEYS if config.get(key) is not None), MASK_KEYS[0])
    return whole(config, key, least=0)


def _axes(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rope parameters that have the axes of positions, or {}."""
    ropes = [values.get(key) for key in ROPE_KEYS]
    found = [each for each in ropes if isinstance(each, Mapping) and each.get("mrope_section")]
    return found[0] if found else {}
