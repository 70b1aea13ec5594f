"""--speculative-config: vLLM's keys, refusals that name them, and methods known by the folder."""

import json

import pytest

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.speculation.config import SpeculativeConfig, guess_method


def parse(**keys):
    return SpeculativeConfig.parse(json.dumps(keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "ngram", "num_speculative_token": 3}, "mean num_speculative_tokens"),
        (
            {"method": "ngram", "parallel_drafting": True},
            "is for method peagle, dflash",
        ),
        ({"method": "eagle3", "parallel_drafting": 1}, "expected true or false, found 1"),
        ({"method": "lookahead"}, "expected one of ngram, suffix, mtp, draft_model"),
        ({"method": "eagle3"}, "requires a drafter"),
        ({"method": "ngram", "model": "x"}, "takes no model"),
        ({}, "has no method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "expected 1 to 128, found 0"),
        ({"method": "ngram", "num_speculative_tokens": "3"}, "expected a number"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "at most"),
        ({"method": "ngram", "image_embeddings": True}, "is for method eagle or eagle3, found"),
        ({"method": "eagle3", "model": "x", "image_embeddings": 1}, "expected true or false"),
        ({"method": "ngram", "rejection_sample_method": "fly"}, "exact, standard, synthetic"),
        ({"method": "ngram", "synthetic_acceptance_rates": [0.5]}, "is required with acceptance"),
        (
            {
                "method": "ngram",
                "acceptance": "synthetic",
                "synthetic_acceptance_rates": [0.5, 0.6, 0.1],
            },
            "none greater than the one before",
        ),
        (
            {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 3], [6, 9, 1]]},
            "consecutive rows",
        ),
    ],
)
def test_invalid_speculative_settings_are_refused_by_name(keys, message):
    with pytest.raises(InputError, match=message):
        parse(**keys)


def test_mtp_from_model_or_separate_folder():
    assert parse(method="mtp").model is None
    assert parse(method="mtp", model="x").model == "x"


def test_one_lookup_limit_sets_both():
    config = parse(method="ngram", prompt_lookup_max=3)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (3, 3)


def test_acceptance_length_gives_acceptance_rates():
    config = parse(
        method="ngram",
        num_speculative_tokens=5,
        rejection_sample_method="synthetic",
        synthetic_acceptance_length=3.55,
    )
    rates = config.synthetic_acceptance_rates
    assert 1 + sum(rates) == pytest.approx(3.55) and len(rates) == 5
    assert rates[1] == pytest.approx(rates[0] ** 2)


@pytest.mark.parametrize(
    ("values", "method"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 9}, "eagle3"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"medusa_num_heads": 4}, "medusa"),
        ({"architectures": ["LlamaForCausalLM"]}, "draft_model"),
    ],
)
def test_method_is_detected_from_folder(tmp_path, values, method):
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert guess_method(str(tmp_path)) == method
    assert parse(model=str(tmp_path)).method == method


def test_speculative_flags_equal_config():
    text = '{"method": "ngram"}'
    config = EngineConfig(model="x", speculative_config=text, spec_acceptance="rejection")
    assert config.speculation.acceptance == "rejection"
    with pytest.raises(InputError, match="expected a JSON object"):
        EngineConfig(model="x", speculative_config="ngram")
