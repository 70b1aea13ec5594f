"""Configs of the tiny random models of each family, and what the families do not support."""

from tests.tiny_families import dense, experts, gemma, latent, newer, older, states
from tests.tiny_families.experts import GROUPS
from tests.tiny_families.gemma import GEMMA
from tests.tiny_families.latent import LATENT, YARN
from tests.tiny_families.older import FALCON, GPT, NEOX
from tests.tiny_families.states import DELTA, MAMBA, SHORT_CONV

__all__ = [
    "DELTA",
    "FALCON",
    "GEMMA",
    "GPT",
    "GROUPS",
    "LATENT",
    "MAMBA",
    "NEOX",
    "ROWS",
    "SHORT_CONV",
    "STACKED_EXPERTS",
    "STATES",
    "TINY",
    "TINY_FAMILIES",
    "WITHOUT_ADAPTERS",
    "YARN",
]

TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    # Larger than usual: the outputs of a random model then differ from token to token.
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
# family -> config class and what it adds; windows shorter than the prompts, so that they matter
TINY_FAMILIES = {
    **dense.FAMILIES,
    **older.FAMILIES,
    **gemma.FAMILIES,
    **experts.FAMILIES,
    **latent.FAMILIES,
    **states.FAMILIES,
    **newer.FAMILIES,
}
# rows of what other families have, too: a few tests run them
ROWS = (*dense.ROWS, *older.ROWS, *gemma.ROWS, *experts.ROWS, *latent.ROWS, *newer.ROWS)
# families whose layers have states
STATES = tuple(states.FAMILIES)
# families of which transformers reads only tensors of all experts of a layer
STACKED_EXPERTS = (
    *("gemma4_moe", "granite_moe", "granite_moe_shared", "granite_moe_swa", "granite_hybrid_moe"),
    *("step", "llama4", "mistral4", "inkling"),
)
# families that adapters are refused for
WITHOUT_ADAPTERS = ("deepseek_v4",)
