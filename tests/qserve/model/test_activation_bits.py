"""Checkpoints that state 4-bit activations: refused, or run with wider ones where a user agrees."""

import pytest
import torch

from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from qserve.kv_transfer.model_digest import page_digest
from qserve.llm import LLM
from qserve.model.model_config import ModelConfig
from qserve.params.sampling_params import SamplingParams
from tests.qserve.model.variants import TOKENS, edited, logits


@pytest.fixture
def folders(written, tmp_path):
    """Three folders of the same codes: W4A4, W4A8, W4A16."""
    source = written("w4a8-g32", "compressed-tensors")
    group = ("quantization_config", "config_groups", "group_0")

    def with_inputs(change):
        def config(value):
            for key in group:
                value = value[key]
            change(value)

        return config

    narrow = edited(
        source,
        tmp_path / "w4a4",
        None,
        with_inputs(lambda g: g["input_activations"].update(num_bits=4)),
    )
    plain = edited(
        source, tmp_path / "w4a16", None, with_inputs(lambda g: g.update(input_activations=None))
    )
    return narrow, source, plain


def test_w4a4_requires_user_flag(folders):
    """With 8 bits it is the file of W4A8, with 16 that of W4A16."""
    narrow, source, plain = folders
    with pytest.raises(InputError, match="4-bit integer activations.*--activation-bits 8 or 16"):
        logits(narrow)
    verdict = inspect_checkpoint(narrow).loads_in[0]
    assert verdict.answer == "no" and "--activation-bits" in verdict.reason
    for bits, same in ((8, source), (16, plain)):
        llm = LLM(narrow, device="cpu", max_model_len=64, activation_bits=bits)
        assert torch.equal(llm.logits(TOKENS), logits(same))
    with pytest.raises(InputError, match="--activation-bits: expected only with"):
        LLM(plain, device="cpu", max_model_len=64, activation_bits=8)


def test_drafter_with_4_bit_activations_runs_with_the_same_flag(folders, docs_5m, quantized_5m):
    """A target without them needs no flag of its own for it."""
    narrow, source, _ = folders
    config = ModelConfig.from_folder(narrow, activation_bits=8, is_drafter=True)
    assert config.quant.scheme == ModelConfig.from_folder(source).quant.scheme
    assert ModelConfig.from_folder(quantized_5m, activation_bits=8, is_drafter=True).quant
    drafts = {"method": "draft_model", "model": str(narrow), "num_speculative_tokens": 2}
    settings = {"device": "cpu", "max_model_len": 64, "speculative_config": drafts}
    with pytest.raises(InputError, match="4-bit integer activations"):
        LLM(narrow, **settings)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    found, want = (
        LLM(narrow, activation_bits=8, **more).generate([TOKENS], params, use_tqdm=False)
        for more in (settings, {"device": "cpu", "max_model_len": 64})
    )
    assert found[0].outputs[0].token_ids == want[0].outputs[0].token_ids


def test_pages_of_other_activation_bits_are_not_exchanged(folders):
    narrow, source, plain = folders

    def digest(folder, bits=None):
        model = ModelConfig.from_folder(folder, activation_bits=bits)
        return page_digest(str(folder), model, max_model_len=64, dummy_seed=None, form="f")

    digests = [digest(narrow, 8), digest(narrow, 16), digest(source), digest(plain)]
    assert len({*digests[:2]}) == 2 and len({*digests[2:]}) == 2
    assert digest(narrow, 8) == digests[0]
