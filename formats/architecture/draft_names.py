"""Names of the tensors of MTP layers (next_token.py) in the two published layouts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNames:
    """Names below an MTP layer's prefix."""

    # Prefix of the decoder layer, which ends in a dot. Empty: the decoder layer has no prefix of
    # its own, and follows the model's layers in number.
    layer: str = ""
    count_key: str = ""  # of config.json, with `layer`: number of MTP layers; 1 if it is absent
    embedding_norm: str = "enorm.weight"
    state_norm: str = "hnorm.weight"
    projection: str = "eh_proj"  # the embedding comes first
    last_norm: str = "shared_head.norm.weight"
    # Copies of the model's own tensors, which are used if these are missing. Empty: always.
    head: str = "shared_head.head"
    embedding: str = "embed_tokens.weight"


LAST_LAYER = DraftNames()  # DeepSeek-V3, GLM-4.5
QWEN_MTP = DraftNames(
    layer="layers.0.",
    count_key="mtp_num_hidden_layers",
    embedding_norm="pre_fc_norm_embedding.weight",
    state_norm="pre_fc_norm_hidden.weight",
    projection="fc",
    last_norm="norm.weight",
    head="",
    embedding="",
)
