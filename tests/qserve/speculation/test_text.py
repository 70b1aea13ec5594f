"""Speculation with the offline API: several outputs of a prompt, and stop strings."""

from qserve import LLM, SamplingParams

PROMPTS = ["A process is a process is a process is", "The standard library", "one two one two one"]


def test_outputs_and_stop_strings_are_the_same(docs_5m):
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=["in", "ss"]),
        SamplingParams(temperature=0.9, seed=4, n=3, max_tokens=16, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.7, seed=5, max_tokens=24, stop=["e"], min_tokens=6),
    ]
    found = []
    for speculation in (
        None,
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4},
        {"method": "draft_model", "model": str(docs_5m)},
    ):
        llm = LLM(docs_5m, device="cpu", max_num_seqs=9, speculative_config=speculation)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        found.append(
            [
                (each.text, each.token_ids, each.finish_reason, each.stop_reason)
                for output in outputs
                for each in output.outputs
            ]
        )
    assert found[0] == found[1] == found[2]
    assert "stop" in {end for _, _, end, _ in found[0]}
