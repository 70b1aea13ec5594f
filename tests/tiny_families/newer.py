"""Families whose rows came last."""

from tests.tiny_families.older import GPT

FAMILIES = {
    # four blocks of queries, values and keys, with two heads each
    "codegen": ("CodeGenConfig", {**GPT, "n_head": 8, "rotary_dim": 4}),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            **{"num_layers": 3, "num_heads": 4, "window_size": 9, "tie_word_embeddings": True},
            "attention_types": [[["global", "local"], 1], [["local"], 1]],
        },
    ),
    "biogpt": ("BioGptConfig", {"tie_word_embeddings": True}),
}
# of what other families have, too: a few tests run them
ROWS = tuple(FAMILIES)
