"""Sample a target's continuations in large batches, with a plain decode loop.

transformers' generation copies its whole KV cache for each token; here keys and values are
allocated once. Only layers like Llama's, without attention windows, are supported.

Legend:
B: texts, P: tokens of a prompt, L: tokens of a text
H: heads, J: KV heads, D: head dim, V: vocabulary
"""

from typing import Any

import torch
from torch.nn import functional

from calibrate.heads.eagle3 import rotated

PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
PREFILL_TOKENS = 2**18  # prompt tokens per forward pass


def can_sample(config: Any) -> bool:
    """Return True if the decode loop supports this model."""
    windows = getattr(config, "layer_types", None) or ["full_attention"]
    return config.model_type in MODEL_TYPES and set(windows) == {"full_attention"}


@torch.no_grad()
def continued(
    decoder: Any, head: torch.nn.Module, prompts_BP: torch.Tensor, length: int, temperature: float
) -> torch.Tensor:
    """Return prompts of equal length with the model's sampled continuations, [B, L].

    `decoder`: the decoder module of a transformers model. `head`: its output matrix.
    """
    config, (B, P) = decoder.config, prompts_BP.shape
    weight = decoder.embed_tokens.weight
    ids_BL = prompts_BP.new_zeros(B, length)
    ids_BL[:, :P] = prompts_BP
    kv_heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (len(decoder.layers), 2, B, kv_heads, length, dim)
    cache = torch.empty(shape, dtype=weight.dtype, device=weight.device)
    positions = torch.arange(length, device=weight.device)[None]
    cos_1LD, sin_1LD = decoder.rotary_emb(weight[:1, None], positions)

    def run(rows: slice, start: int, end: int) -> torch.Tensor:
        """Run tokens `start` to `end` of the texts `rows`; return their last states [B, C]."""
        x = functional.embedding(ids_BL[rows, start:end], weight)
        turns = cos_1LD[:, start:end], sin_1LD[:, start:end]
        for layer, (keys, values) in zip(decoder.layers, cache, strict=True):
            attention, mlp, first_norm, second_norm = (getattr(layer, part) for part in PARTS)
            y = first_norm(x)
            q, k, v = (
                projection(y).unflatten(-1, (-1, dim))
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            if hasattr(attention, "q_norm"):
                q, k = attention.q_norm(q), attention.k_norm(k)
            q, k = (rotated(each.transpose(1, 2), *turns) for each in (q, k))
            keys[rows, :, start:end], values[rows, :, start:end] = k, v.transpose(1, 2)
            out = _attended(q, keys[rows, :, :end], values[rows, :, :end])
            x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
            x = x + mlp(second_norm(x))
        return decoder.norm(x[:, -1])

    step = max(1, PREFILL_TOKENS // P)
    states = [run(slice(at, at + step), 0, P) for at in range(0, B, step)]
    ids_BL[:, P] = drawn(head(torch.cat(states)), temperature)
    for at in range(P, length - 1):
        ids_BL[:, at + 1] = drawn(head(run(slice(None), at, at + 1)), temperature)
    return ids_BL


def _attended(q_BHTD: torch.Tensor, k_BJSD: torch.Tensor, v_BJSD: torch.Tensor) -> torch.Tensor:
    """Return attention outputs [B, H, T, D], for all tokens of a text or only for its last one."""
    B, H, T, _ = q_BHTD.shape
    if T > 1:
        shares = k_BJSD.shape[1] != H
        return functional.scaled_dot_product_attention(
            q_BHTD, k_BJSD, v_BJSD, is_causal=True, enable_gqa=shares
        )
    # Treat heads that share keys as rows of one head; otherwise torch copies the keys per head.
    q_BJGD = q_BHTD.reshape(B, k_BJSD.shape[1], -1, q_BHTD.shape[3])
    out_BJGD = functional.scaled_dot_product_attention(q_BJGD, k_BJSD, v_BJSD)
    return out_BJGD.reshape(q_BHTD.shape)


def drawn(logits_BV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Sample one token per row. Temperature 0 returns the most likely token."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    # Gumbel-max: the argmax of logits plus Gumbel noise is a sample from their softmax, and needs
    # no normalization.
    noise_BV = torch.empty_like(logits_BV, dtype=torch.float32).exponential_().log_()
    return (logits_BV.float() / temperature - noise_BV).argmax(-1)
