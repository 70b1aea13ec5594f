"""Mixtures of experts on a CUDA GPU: steps of few tokens, by every variant, in a whole engine."""

import json

import pytest
import torch

from formats.codecs.config_fields import BLOCK
from formats.quant_config import QuantConfig
from formats.scheme import Scheme
from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

# Of the sizes that integer tensor cores and the kernels for few tokens take.
SIZES = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 768,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
PARAMS = SamplingParams(
    temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=0, detokenize=False
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    block = QuantConfig(method="gptq", scheme=Scheme.parse("w4a16-sym")).to_dict()
    (folder / "config.json").write_text(json.dumps(SIZES | {BLOCK: block}))
    return folder


def outputs(folder, batch: int, kernel: list[str]):
    llm = LLM(
        str(folder),
        load_format="dummy",
        device="cuda",
        max_num_seqs=batch,
        max_model_len=128,
        num_gpu_blocks_override=256,
        kernel=kernel,
    )
    prompts = [[5 + n, *range(30 + n, 36 + 2 * n)] for n in range(batch)]
    return llm.generate(prompts, PARAMS, use_tqdm=False)


@pytest.mark.parametrize("batch", [1, 2, 4, 9, 20])
def test_moe_variants_agree(folder, batch):
    """Experts' outputs reach the next norm as parts of a sum, which it adds in its own form."""
    want, *others = (
        outputs(folder, batch, kernel)
        for kernel in (["experts=sorted", "w4a16=triton"], ["experts=-sm90_few_tokens"], [])
    )
    for found in others:
        of_prompts = [
            torch.tensor(
                [
                    each.logprob
                    for output in out
                    for entry in output.prompt_logprobs[1:]
                    for each in entry.values()
                ]
            )
            for out in (want, found)
        ]
        assert (of_prompts[0] - of_prompts[1]).abs().mean() < 0.02
        same = [
            a.outputs[0].token_ids[:4] == b.outputs[0].token_ids[:4]
            for a, b in zip(want, found, strict=True)
        ]
        assert sum(same) >= 0.8 * batch - 0.5
