"""Architectures that are refused by name, each with the reason and an alternative."""

from collections.abc import Mapping
from typing import Any

from formats.architecture.family import architecture_of
from formats.errors import CheckpointError

_CHATGLM = (
    "is the form of ChatGLM that runs code from its folder",
    "use its form for transformers, such as zai-org/glm-4-9b-chat-hf",
)
_LISTED = "use a model of a family that `qserve families` lists"
_INKLING = (
    "has biases of attention that depend on the distance and on the query, and four short"
    " convolutions in each layer, which are not supported",
    _LISTED,
)
_KIMI_K3 = (
    "has attention over the outputs of earlier layers (`attn_res_block_size`), which is not"
    " supported",
    "use Kimi-K2.5 or Kimi Linear",
)
_QWEN_4 = (
    "has streams of hidden states with hyper-connections and embeddings of n-grams, which are not"
    " supported",
    "use Qwen3.5 or Qwen3.6",
)
_MLLAMA = (
    "attends to images in layers of cross-attention, which are not supported",
    "use Llama 4, or a text model such as meta-llama/Llama-3.1-8B-Instruct",
)
_ZAMBA = ("shares blocks of attention between layers, which is not supported", _LISTED)
# models of images whose vision part is code in their folder
_OWN_VISION = (
    "has a vision part that is code in its folder, which is never run",
    "use a model of images that qserve/docs/models.md lists",
)
# architecture -> (problem, remedy)
REFUSED: dict[str, tuple[str, str]] = {
    "ChatGLMModel": _CHATGLM,
    "ChatGLMForConditionalGeneration": _CHATGLM,
    "RWForCausalLM": (
        "is the form of Falcon that runs code from its folder",
        "use its form for transformers, such as tiiuae/falcon-7b",
    ),
    "DiffusionGemmaForBlockDiffusion": (
        "generates blocks of tokens by diffusion: all positions of a block change in each step,"
        " while this engine generates one token after another",
        "use Gemma 4, such as google/gemma-4-26B-A4B-it",
    ),
    **dict.fromkeys(("KimiK3ForConditionalGeneration", "KimiK3ForCausalLM"), _KIMI_K3),
    "MistralLarge4ForConditionalGeneration": (
        "scales queries by a learned function of the position in each head, rotates by learned"
        " frequencies, and selects keys by an indexer without query latents, which are not"
        " supported",
        "use Mistral Small 4 or a model of another family that `qserve families` lists",
    ),
    "AXK2ForCausalLM": (
        "has gates on its norms (`gated_norm_rank`) and computes queries from two latents, which"
        " are not supported",
        "use A.X K1",
    ),
    "DeciLMForCausalLM": (
        "has layers of different sizes and layers without attention (`block_configs`), which are"
        " not supported",
        "use Nemotron-H or Nemotron 3",
    ),
    "Glm5NextForConditionalGeneration": (
        "has streams of hidden states with hyper-connections and an indexer that selects groups of"
        " keys (`index_kpool`), which are not supported",
        "use GLM-5 or GLM-4.7-Flash",
    ),
    "HYV4ForCausalLM": (
        "has streams of hidden states with hyper-connections and attention sinks in latent"
        " attention, which are not supported",
        "use Hy3",
    ),
    "Molmo2ForConditionalGeneration": (
        "pools patches of images by attention and has a text model of its own, which are not"
        " supported",
        "use a model of images that qserve/docs/models.md lists",
    ),
    "MuseSparkForConditionalGeneration": (
        "has a gate of the residual stream in each layer (`residual_gate_temperature`), which is"
        " not supported",
        "use Muse Glimmer",
    ),
    "RecurrentGemmaForCausalLM": (
        "has linear recurrent units (RG-LRU), which are not supported",
        "use Gemma 3 or Gemma 4",
    ),
    "ZayaForCausalLM": (
        "has attention with convolutions over compressed queries and keys, and a router whose state"
        " passes from layer to layer, which are not supported",
        _LISTED,
    ),
    **dict.fromkeys(("MllamaForConditionalGeneration", "MllamaForCausalLM"), _MLLAMA),
    **dict.fromkeys(("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"), _QWEN_4),
    **dict.fromkeys(("ZambaForCausalLM", "Zamba2ForCausalLM"), _ZAMBA),
    **dict.fromkeys(
        (
            *("MiniCPMV", "MiniCPMO", "DotsOCRForCausalLM", "Phi3VForCausalLM", "Ovis", "Ovis2_5"),
            *("DeepseekVLV2ForCausalLM", "KeyeForConditionalGeneration", "MolmoForCausalLM"),
        ),
        _OWN_VISION,
    ),
    **dict.fromkeys(
        (*("Inkling2ForCausalLM", "Inkling2ForConditionalGeneration"),),
        _INKLING,
    ),
}


def check_not_refused(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError, with the reason, if config.json names a refused architecture."""
    name = architecture_of(config)
    if name in REFUSED:
        problem, remedy = REFUSED[name]
        raise CheckpointError("config.json architectures", f"{name} {problem}", remedy)
