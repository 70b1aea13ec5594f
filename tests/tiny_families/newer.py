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
    # the row of sinusoids that is zero is one of a prompt's positions
    "xglm": (
        "XGLMConfig",
        {
            **{"d_model": 64, "ffn_dim": 96, "num_layers": 3, "attention_heads": 4},
            **{"tie_word_embeddings": True, "pad_token_id": 5},
        },
    ),
}
# of what other families have, too: a few tests run them
ROWS = tuple(FAMILIES)
# three layers with a window, which rotate, and one that sees all keys and does not
FAMILIES["muse_glimmer"] = (
    "MuseGlimmerTextConfig",
    {
        **{"head_dim": 32, "num_hidden_layers": 4, "sliding_window": 9, "pad_token_id": 0},
        **{"qk_scale_factor": 2.5, "output_multiplier": 0.6, "post_norm_eps": 0.3},
        **{"final_logit_softcapping": 5.0, "rms_norm_eps": 1e-3},
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
)
