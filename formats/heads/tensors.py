"""Tensors of a draft head: canonical names, shapes, and names in files.

Canonical names are those of the speculators layout: `layers.0.` instead of `midlayer.`, no `model.`
prefix, `fc_norm.0` to `.2` instead of `aux_norm_low` to `_high`. Legend: C hidden size, I
intermediate size, V vocabulary, F inputs of `fc`, R rank of the Markov head.
"""

from collections.abc import Mapping

from formats.architecture.family import DERIVED
from formats.heads.block_config import BlockConfig
from formats.heads.config import PEAGLE, EagleConfig, HeadConfig, MedusaConfig

Shape = tuple[int, ...]
FIRST_LAYER = "layers.0"
# prefixes in files -> canonical prefixes; the first match counts
RENAMED = (
    ("model.", ""),
    ("medusa_head.", ""),
    ("midlayer.", f"{FIRST_LAYER}."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)
EMBEDDING, HEAD, NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"
# Tables of a smaller draft vocabulary: offset from each draft id to the target's id; mask of the
# target's ids.
TO_TARGET, IN_DRAFT = "d2t", "t2d"
MASK_HIDDEN = "mask_hidden"  # P-EAGLE: the states [F] of rows whose token is not known yet
MASK_EMBEDDING = "mask_embedding"  # embedding of mask tokens, instead of the table's row
HIDDEN_NORM = "hidden_norm.weight"  # norm of the output of `fc`
MARKOV_IN, MARKOV_OUT = "markov_head.markov_w1", "markov_head.markov_w2"
MARKOV_STEPS = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}
CONFIDENCE = "confidence_head.proj"


def canonical(name: str) -> str:
    """Return the canonical name of a file's tensor."""
    for start, instead in RENAMED:
        if name.startswith(start):
            name = instead + name.removeprefix(start)
    return name


def is_derived(name: str) -> bool:
    """Return True for a tensor that readers compute themselves."""
    return name.endswith(DERIVED)


def linears(config: HeadConfig) -> dict[str, Shape]:
    """Return the matrices [outputs, inputs] by module, in the order they run.

    For Medusa, whose config states no sizes, the shapes are ().
    """
    if isinstance(config, MedusaConfig):
        return {
            name: ()
            for head in range(config.num_heads)
            for name in (
                *(f"{head}.{layer}.linear" for layer in range(config.num_layers)),
                f"{head}.{config.num_layers}",
            )
        }
    C, inner, target = config.hidden_size, config.intermediate_size, config.target_hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found: dict[str, Shape] = {"fc": (C, fc_inputs(config))}
    for layer in range(config.num_layers):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        ins = 2 * C if layer == 0 and _is_eagle3(config) else C
        found |= {
            f"{attention}.q_proj": (q, ins),
            f"{attention}.k_proj": (kv, ins),
            f"{attention}.v_proj": (kv, ins),
            f"{attention}.o_proj": (C, q),
            f"{mlp}.gate_proj": (inner, C),
            f"{mlp}.up_proj": (inner, C),
            f"{mlp}.down_proj": (C, inner),
        }
    if isinstance(config, BlockConfig) or config.is_eagle3:
        found["lm_head"] = (config.draft_vocab_size, C)
    else:
        found["lm_head"] = (config.vocab_size, target)
    return {**found, **_markov_linears(config)}


def _is_eagle3(config: HeadConfig) -> bool:
    return isinstance(config, EagleConfig) and config.is_eagle3


def _markov_linears(config: HeadConfig) -> dict[str, Shape]:
    if not isinstance(config, BlockConfig) or not config.markov_rank:
        return {}
    C, R = config.hidden_size, config.markov_rank
    steps = {"gated": (R, C + R), "rnn": (3 * R, 2 * R + C)}
    found: dict[str, Shape] = {MARKOV_OUT: (config.draft_vocab_size, R)}
    if config.markov_type in steps:
        found[MARKOV_STEPS[config.markov_type]] = steps[config.markov_type]
    return found


def fc_inputs(config: EagleConfig | BlockConfig) -> int:
    """Return the width of `fc`'s input: all auxiliary states, or EAGLE's embedding and state."""
    if isinstance(config, BlockConfig) or config.is_eagle3:
        return config.num_aux * config.target_hidden_size
    return config.hidden_size + config.target_hidden_size


def required(config: HeadConfig) -> dict[str, Shape]:
    """Return the float tensors that a head must have in addition to its matrices."""
    if isinstance(config, MedusaConfig):
        return {
            f"{head}.{layer}.linear.bias": ()
            for head in range(config.num_heads)
            for layer in range(config.num_layers)
        }
    C, F = (config.hidden_size,), fc_inputs(config)
    found: dict[str, Shape] = {}
    is_block, is_eagle3 = isinstance(config, BlockConfig), _is_eagle3(config)
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        if is_eagle3 and layer == 0:
            found[f"{prefix}.hidden_norm.weight"] = C
        if is_block or is_eagle3 or layer > 0:
            found[f"{prefix}.input_layernorm.weight"] = C
        found[f"{prefix}.post_attention_layernorm.weight"] = C
    if is_block:
        found |= {NORM: C, HIDDEN_NORM: C}
        if config.markov_rank:
            found[f"{MARKOV_IN}.weight"] = (config.vocab_size, config.markov_rank)
            if config.markov_type in MARKOV_STEPS:
                name = MARKOV_STEPS[config.markov_type]
                found[f"{name}.bias"] = _markov_linears(config)[name][:1]
    if is_eagle3:
        found[NORM] = C
        if config.norm_before_fc:
            found["input_norm.weight"] = (F,)
        if config.fc_norm:
            found |= {
                f"fc_norm.{number}.weight": (config.target_hidden_size,)
                for number in range(config.num_aux)
            }
    return found


def optional(config: HeadConfig) -> dict[str, Shape]:
    """Return tensors that a head may have.

    If the embedding or the output head is missing, the target's is used. A head that drafts over
    the whole vocabulary needs no tables.
    """
    if isinstance(config, MedusaConfig):
        return {}
    vocab, d = config.vocab_size, config.head_dim
    found: dict[str, Shape] = {
        EMBEDDING: (vocab, config.hidden_size),
        "fc.bias": (config.hidden_size,),
        TO_TARGET: (config.draft_vocab_size,),
        IN_DRAFT: (vocab,),
    }
    if isinstance(config, BlockConfig):
        found[MASK_EMBEDDING] = ()
        found[f"{CONFIDENCE}.weight"] = (1, config.confidence_inputs or config.hidden_size)
        found[f"{CONFIDENCE}.bias"] = (1,)
    elif config.kind == PEAGLE:
        found[MASK_HIDDEN] = ()
    for name, shape in linears(config).items():
        if name.startswith("layers."):
            found[f"{name}.bias"] = shape[:1]
    for layer in range(config.num_layers):
        for norm in ("q_norm", "k_norm"):
            found[f"layers.{layer}.self_attn.{norm}.weight"] = (d,)
    return found


def may_be_missing(config: HeadConfig) -> frozenset[str]:
    """Return matrices that may be missing, because the target's are used."""
    if isinstance(config, MedusaConfig):
        return frozenset()
    has_own = isinstance(config, BlockConfig) or config.is_eagle3
    shares = not has_own or config.draft_vocab_size == config.vocab_size
    return frozenset({"lm_head"} if shares else ())


def shapes(config: HeadConfig) -> Mapping[str, Shape]:
    """Return every tensor that a float head may have, by its canonical name."""
    weights = {f"{name}.weight": shape for name, shape in linears(config).items()}
    return {**weights, **required(config), **optional(config)}
