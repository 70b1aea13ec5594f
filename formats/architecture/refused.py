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
