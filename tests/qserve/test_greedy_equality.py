"""The engine's greedy tokens are transformers' own, token for token, however the steps are cut."""

import random

import pytest
import torch

from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams

NUM_PROMPTS, NUM_TOKENS = 20, 24

# name -> engine settings, number of concurrent prompts, steps in flight
MODES = {
    "alone": ({}, 1, 0),
    "eight together": ({}, 8, 0),
    "chunked prompts": ({"max_num_batched_tokens": 11, "max_num_seqs": 8}, 20, 0),
    "preempted": (
        {"num_gpu_blocks_override": 22, "admission": "fits", "block_size": 8, "max_num_seqs": 6},
        20,
        0,
    ),
    "repeated prompt": ({"block_size": 8}, 20, 1),
    "one step in flight": ({"max_num_batched_tokens": 32, "max_num_seqs": 8}, 20, 1),
    "preempted in flight": (
        {"num_gpu_blocks_override": 22, "admission": "fits", "block_size": 8, "max_num_seqs": 6},
        20,
        1,
    ),
}
FAMILIES = ("docs-5m", "llama", "mistral", "qwen2", "qwen3")
# Besides those of docs-5m. A window gives pages back; heads of another width share larger pages.
IN_EACH_RUN = [
    ("mistral", "preempted"),
    ("mistral", "repeated prompt"),
    ("qwen3", "preempted in flight"),
]


def make_prompts(vocab_size):
    rng = random.Random(11)
    lengths = [1, 2, 3, 7, 8, 9, 16, 17] + [rng.randint(4, 90) for _ in range(NUM_PROMPTS - 8)]
    return [[rng.randrange(3, vocab_size) for _ in range(n)] for n in lengths]


@pytest.fixture(scope="module")
def references(quantized_5m, tiny_model, transformers_model):
    """family -> (folder, prompts, transformers' greedy continuations)."""
    made = {}

    def make(family):
        if family not in made:
            folder = quantized_5m if family == "docs-5m" else tiny_model(family)
            model = transformers_model(folder)
            prompts = make_prompts(model.config.vocab_size)
            outputs = [
                model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt)),
                    max_new_tokens=NUM_TOKENS,
                    do_sample=False,
                    pad_token_id=0,
                )[0, len(prompt) :].tolist()
                for prompt in prompts
            ]
            assert len({tuple(output) for output in outputs}) > NUM_PROMPTS // 2
            made[family] = folder, prompts, outputs
        return made[family]

    return make


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        (family, mode)
        if family == "docs-5m" or (family, mode) in IN_EACH_RUN
        else pytest.param(family, mode, marks=pytest.mark.exhaustive)
        for family in FAMILIES
        for mode in MODES
    ],
)
def test_tokens_equal_transformers(family, mode, references, monkeypatch):
    folder, prompts, expected = references(family)
    settings, at_once, in_flight = MODES[mode]
    if family == "mistral" and "preempted" in mode:
        # its layers all have a window, whose pages are soon given back
        settings = {
            **settings,
            "num_gpu_blocks_override": 15,
            "admission": "fits",
            "max_num_seqs": 20,
        }
    llm = LLM(folder, device="cpu", dtype="float32", **settings)
    llm.engine._max_in_flight = in_flight
    preemptions = 0
    schedule = llm.engine.scheduler.schedule

    def counting_schedule():
        nonlocal preemptions
        plan = schedule()
        preemptions += len(plan.preempted)
        llm.engine.scheduler.check_integrity()
        return plan

    monkeypatch.setattr(llm.engine.scheduler, "schedule", counting_schedule)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, detokenize=False)
    if "second time" in mode:
        llm.generate(prompts, params, use_tqdm=False)
        admitted = llm.engine.scheduler.cache.take_
        hits = []
        monkeypatch.setattr(
            llm.engine.scheduler.cache,
            "take_",
            lambda request: (admitted(request), hits.append(request.facts.num_cached)),
        )
    got = []
    for start in range(0, len(prompts), at_once):
        batch = prompts[start : start + at_once]
        outputs = llm.generate(batch, params, use_tqdm=False)
        got += [output.outputs[0].token_ids for output in outputs]
    assert got == expected
    if "second time" in mode:
        assert hits == [(len(prompt) - 1) // 8 * 8 for prompt in prompts]
    assert (preemptions > 0) == ("preempted" in mode)
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_pages
