"""Small engines of one rank and of several, and the requests that they get."""

import gc
import random

from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams

NUM_TOKENS = 12
SMALL = {
    "max_num_batched_tokens": 24,
    "num_gpu_blocks_override": 13,
    "admission": "fits",
    "block_size": 8,
}


def make_prompts(count=12, vocab_size=512):
    """Some begin alike, so that they find each other's pages."""
    rng = random.Random(7)
    shared = [rng.randrange(3, vocab_size) for _ in range(24)]
    lengths = [1, 2, 7, 8, 9, *(rng.randint(10, 70) for _ in range(count - 5))]
    prompts = [[rng.randrange(3, vocab_size) for _ in range(n)] for n in lengths]
    return [shared + p[:9] if i % 3 == 2 else p for i, p in enumerate(prompts)]


def tokens(llm, prompts, loras=None, **sampling):
    """`loras`: the adapter of each."""
    params = SamplingParams(
        max_tokens=NUM_TOKENS, **{"temperature": 0, **sampling}, detokenize=False
    )
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False, lora_request=loras)
    return [output.outputs[0].token_ids for output in outputs]


def start(folder, tensor=1, stages=1, **settings):
    gc.collect()  # an engine of a test before, if one is left
    return LLM(
        folder,
        device="cpu",
        dtype="float32",
        max_model_len=128,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        **{"max_num_seqs": 6, **settings},
    )
