"""config.json of a head that drafts a block in one pass: DFlash and DSpark.

"original" is flat, a Qwen3 config with `dflash_config` (z-lab) or with the same keys at the top
level (DeepSpec). "speculators" is nested, as for EAGLE-3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from formats.errors import CheckpointError
from formats.heads.layers_config import (
    COPY_HEAD,
    ORIGINAL,
    LayersConfig,
    flag,
    layers_of,
    numbers,
    whole,
)

DFLASH, DSPARK = "dflash", "dspark"
DFLASH2 = "dflash2"  # known by name, not served
FLAT_AUX_KEY, NESTED_AUX_KEY = "target_layer_ids", "aux_hidden_state_layer_ids"
INNER = "dflash_config"
MARKOV_TYPES = ("vanilla", "gated", "rnn")
DEFAULT_BLOCK = {DFLASH: 16, DSPARK: 7}
SLIDING = "sliding_attention"
# keys that change what the layers compute, and the only value that is served
PLAIN_KEYS = {
    "is_neox_style": True,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "use_aux_hidden_state": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAttention:
    """Keys that the rows of a block see in one layer."""

    is_causal: bool  # True: a row sees the block's earlier rows; False: the whole block
    window: int | None  # number of keys before the block that rows see; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(LayersConfig):
    """A DFlash or DSpark head: its layers, its block, and the target's states that it reads."""

    kind: Literal["dflash", "dspark"]
    explicit_aux_layers: tuple[int, ...]  # layer ids as config.json counts them
    block_size: int  # rows in training: the newest token, then mask tokens
    mask_token_id: int
    samples_anchor: bool  # the row of the newest token predicts the first draft
    attentions: tuple[BlockAttention, ...]  # one for each layer
    markov_rank: int = 0  # DSpark: rank of the bias that depends on the previous token; 0: none
    markov_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence_inputs: int = 0  # DSpark: inputs of the confidence head, which is not run; 0: none
    embedding_factor: float = 1.0
    logits_factor: float = 1.0
    logits_cap: float = 0.0  # 0: none

    @property
    def num_aux(self) -> int:
        """Number of the target's auxiliary hidden states per token."""
        return len(self.explicit_aux_layers)

    @property
    def max_drafts(self) -> int:
        """Largest number of drafts of a block."""
        return self.block_size if self.samples_anchor else self.block_size - 1

    def aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the auxiliary hidden states that the head reads, as numbers of layers before them.

        A flat config names the layer whose output the state is, with -1 for the embedding. Raises
        CheckpointError for states that the target does not have.
        """
        aux_layers = self.explicit_aux_layers
        if self.layout == ORIGINAL:
            aux_layers = tuple(layer + 1 for layer in aux_layers)
        if not all(0 <= layer <= num_target_layers for layer in aux_layers):
            raise CheckpointError(
                f"config.json {FLAT_AUX_KEY if self.layout == ORIGINAL else NESTED_AUX_KEY}",
                f"expected auxiliary layers of a target model with {num_target_layers} layers,"
                f" found {list(self.explicit_aux_layers)}",
                "use the head with the model that it was trained for",
            )
        return aux_layers


def read_block_config(config: Mapping[str, Any], kind: str) -> BlockConfig:
    """Read the config.json of a DFlash or DSpark head. Raises CheckpointError, naming the key."""
    inner = config.get(INNER)
    if inner is not None and not isinstance(inner, dict):
        raise CheckpointError(
            f"config.json {INNER}", f"expected an object, found {inner!r:.80}", COPY_HEAD
        )
    stated = {**config, **(inner or {})}
    layers = layers_of(config, stated)
    is_flat = layers["layout"] == ORIGINAL
    for key, served in PLAIN_KEYS.items():
        if stated.get(key, served) != served:
            raise CheckpointError(
                f"config.json {key}",
                f"expected {served}, found {stated[key]!r}",
                "use another head",
            )
    aux_key = FLAT_AUX_KEY if is_flat else NESTED_AUX_KEY
    aux_layers = numbers(stated, aux_key)
    if not aux_layers:
        raise CheckpointError(
            f"config.json {aux_key}",
            "is missing: it lists the target layers whose states the head reads",
            COPY_HEAD,
        )
    rank = whole(stated, "markov_rank", 0 if is_flat else 256, least=0) if kind == DSPARK else 0
    markov = stated.get("markov_head_type", MARKOV_TYPES[0])
    if markov not in MARKOV_TYPES:
        expected = f"expected one of {', '.join(MARKOV_TYPES)}"
        raise CheckpointError(
            "config.json markov_head_type", f"{expected}, found {markov!r}", "use another head"
        )
    confidence = 0
    if kind == DSPARK and flag(stated, "enable_confidence_head", not is_flat):
        with_markov = flag(stated, "confidence_head_with_markov", not is_flat)
        confidence = layers["values"]["hidden_size"] + (rank if with_markov else 0)
    return BlockConfig(
        **layers,
        kind=kind,
        explicit_aux_layers=aux_layers,
        block_size=whole(stated, "block_size", DEFAULT_BLOCK[kind]),
        mask_token_id=whole(stated, "mask_token_id", least=0),
        samples_anchor=flag(stated, "sample_from_anchor", kind == DSPARK),
        attentions=_attentions(
            {**layers["values"], **stated}, layers["values"]["num_hidden_layers"]
        ),
        markov_rank=rank,
        markov_type=markov,
        confidence_inputs=confidence,
        embedding_factor=_factor(stated, "input_embedding_scale", 1.0),
        logits_factor=_factor(stated, "output_multiplier", _factor(stated, "logit_scale", 1.0)),
        logits_cap=_factor(stated, "final_logit_softcapping", 0.0),
    )


def _attentions(config: Mapping[str, Any], num_layers: int) -> tuple[BlockAttention, ...]:
    """Return the keys that each layer sees.

    Layers with a window are causal unless config.json says otherwise.
    """
    types = config.get("layer_types") or []
    everywhere = flag(config, "use_swa", False) and SLIDING not in types
    window = config.get("swa_window_size", config.get("sliding_window"))
    is_causal = config.get("is_causal", config.get("causal"))
    if config.get("sliding_window_non_causal"):
        is_causal = False
    found = []
    for layer in range(num_layers):
        slides = everywhere or (layer < len(types) and types[layer] == SLIDING)
        if slides and (type(window) is not int or window < 1):
            raise CheckpointError(
                "config.json sliding_window",
                f"expected a number of 1 or more, found {window!r}",
                COPY_HEAD,
            )
        of_type = layer < len(types) and types[layer] == SLIDING
        found.append(
            BlockAttention(
                is_causal=of_type if is_causal is None else bool(is_causal),
                window=window if slides else None,
            )
        )
    return tuple(found)


def _factor(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    value = default if value is None else value
    if type(value) not in (int, float):
        raise CheckpointError(
            f"config.json {key}", f"expected a number, found {value!r:.80}", COPY_HEAD
        )
    return float(value)
