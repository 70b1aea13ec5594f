"""Random models of one layer, and the data that calibrates them."""

from pathlib import Path

import torch

SMALL = {
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
LLAMA = {
    **SMALL,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
# for tools whose folders need no more
NARROW = {
    **LLAMA,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
# blocks of 128 x 128: several in most matrices
WIDE = {
    **LLAMA,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_key_value_heads": 2,
}
MIXTRAL = {**LLAMA, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = {
    **LLAMA,
    "head_dim": 16,
    "moe_intermediate_size": 96,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
QWEN3_5_MOE = {
    **QWEN3_MOE,
    "layer_types": ["full_attention"],
    "shared_expert_intermediate_size": 32,
}
# name -> transformers' classes of the config and of the model, values of the config
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "narrow": ("LlamaConfig", "LlamaForCausalLM", NARROW),
    "wide": ("LlamaConfig", "LlamaForCausalLM", WIDE),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", MIXTRAL),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN3_MOE),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", QWEN3_5_MOE),
}
WINDOWS, LENGTH = 16, 64


def float_model(folder: Path, name: str) -> None:
    """A random model and a tokenizer of one word for each token."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    config, model_class, values = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config)(**values))
    model = model.to(torch.float16)
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(SMALL["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", pad_token="w1"
    ).save_pretrained(folder)


def windows() -> torch.Tensor:
    return torch.randint(2, 64, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(1))
