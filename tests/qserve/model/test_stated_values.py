"""Values of config.json that no model can have are refused by their key; defaults are the model's.

transformers checks types of the keys of its own config classes, but not those of families whose
code is in the model's folder.
"""

import math

import pytest
import torch
from safetensors.torch import load_file

from calibrate.pipeline import quantize_checkpoint
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from qserve.llm import LLM
from tests.own_code.models import TINY_MODELS
from tests.qserve.model.variants import TOKENS, edited, logits, relative

WRONG = [
    ("ling_2", {"num_experts": "8"}, "num_experts: expected a number above 0, found '8'"),
    ("ling_2", {"num_experts_per_tok": [3]}, "num_experts_per_tok: expected a number above 0"),
    ("ling_2", {"n_group": 0}, "n_group: expected a number above 0, found 0"),
    ("ling_2", {"routed_scaling_factor": "2.5"}, "routed_scaling_factor: expected a number"),
    ("ling_2", {"first_k_dense_replace": "1"}, "first_k_dense_replace: expected a number of"),
    ("plamo2", {"mamba_step": 0}, "mamba_step: expected a number above 0, found 0"),
    (
        "plamo2",
        {"full_attention_idx": 3},
        "full_attention_idx: expected a list of numbers of layer",
    ),
    ("plamo2", {"mamba_num_heads": None}, "mamba_n"),
    ("plamo2", {"mamba_d_state": "16"}, "mamba_d_state: expected a number above 0, found '16'"),
    ("plamo3", {"sliding_window_pattern": -1}, "sliding_window_pattern: expected a number above"),
    ("plamo3", {"window_size": [7, 7, 7]}, "sliding_window: expected windows as in the layers"),
    ("plamo3", {"window_size": [[7], None, [7]]}, "sliding_window: expected the same window in"),
    ("solar", {"rms_norm_eps": math.nan}, "rms_norm_eps: expected a finite number of 0 or more"),
    ("solar", {"num_key_value_heads": 0}, "num_key_value_heads: expected a divisor of the 4"),
    ("mamba", {"layer_norm_epsilon": -1.0}, "layer_norm_epsilon: expected a finite number"),
    ("falcon_mamba", {"mixer_rms_eps": math.inf}, "mixer_rms_eps: expected a finite number"),
    ("falcon_mamba", {"state_size": -1}, "state_size: expected a number above 0, found -1"),
    ("falcon_mamba", {"time_step_rank": "x"}, "time_step_rank: expected a number above 0"),
    ("jamba", {"num_experts": 0}, "num_experts: expected a number above 0, found 0"),
    ("minimax", {"mlp_beta_factor": math.inf}, "mlp_beta_factor: expected a finite number, found"),
    ("granite", {"logits_scaling": math.nan}, "logits_scaling: expected a finite number, found n"),
    ("falcon_h1", {"ssm_multipliers": [1.0, 1.0, -math.inf, 1.0, 1.0]}, "ssm_multipliers: expect"),
    ("falcon_h1", {"key_multiplier": None}, "key_multiplier: expected a finite number, found None"),
    ("falcon_h1", {"lm_head_multiplier": None}, "lm_head_multiplier: expected a finite number"),
    ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers: expected 2 numbers, found .1.0."),
    ("falcon_h1", {"ssm_multipliers": [1.0] * 6}, "ssm_multipliers: expected 5 numbers, found"),
    ("falcon_h1", {"mamba_d_state": None}, "mamba_d_state: expected a number above 0, found None"),
    ("granite_hybrid", {"logits_scaling": None}, "logits_scaling: expected a finite number, found"),
    ("cohere", {"logit_scale": None}, "logit_scale: expected a finite number, found None"),
    ("qwen3_next", {"linear_value_head_dim": 0}, "linear_value_head_dim: expected a number above"),
    ("laguna", {"layer_types": 7}, "layer_types: expected a list with an entry for each layer"),
    ("jamba", {"mamba_expand": -1}, ": states no sizes from which the number of channels of Mam"),
]


@pytest.mark.parametrize(("name", "stated", "message"), WRONG, ids=lambda value: str(value)[:32])
def test_impossible_value_is_refused(own_code, tiny_model, tmp_path, name, stated, message):
    source = own_code(name) if name in TINY_MODELS else tiny_model(name)
    folder = edited(source, tmp_path / "x", config=lambda config: config.update(stated))
    with pytest.raises(InputError, match=f"config.json ?{message}"):
        LLM(folder, device="cpu", max_model_len=64)


@pytest.mark.parametrize(
    ("name", "key"), [("granite", "residual_multiplier"), ("lfm2", "block_ffn_dim_multiplier")]
)
def test_inspect_names_a_factor_that_is_not_finite(tiny_model, tmp_path, name, key):
    stated = {key: math.inf}
    folder = edited(tiny_model(name), tmp_path / "x", config=lambda config: config.update(stated))
    problems = inspect_checkpoint(folder).problems
    assert f"config.json {key}: expected a finite number, found inf" in {
        f"{each.subject}: {each.text}" for each in problems
    }


@pytest.mark.parametrize(
    ("name", "stated", "message"),
    [
        ("qwen2_moe", {"mlp_only_layers": -1}, "mlp_only_layers: expected a list of numbers of la"),
        ("qwen2_moe", {"decoder_sparse_step": "2"}, "decoder_sparse_step: expected a whole number"),
        ("bamba", {"attn_layer_indices": "1"}, "attn_layer_indices: expected a list of numbers of"),
        (
            "lfm2",
            {"layer_types": None, "full_attn_idxs": 1},
            "full_attn_idxs: expected a list of n",
        ),
        ("glm4_moe", {"first_k_dense_replace": [1]}, "first_k_dense_replace: expected a whole num"),
    ],
)
def test_inspect_says_which_key_does_not_list_layers(tiny_model, tmp_path, name, stated, message):
    folder = edited(tiny_model(name), tmp_path / "x", config=lambda config: config.update(stated))
    with pytest.raises(InputError, match=f"config.json {message}"):
        inspect_checkpoint(folder)


@pytest.mark.parametrize(
    "stated", [{"num_attention_heads": 2**40}, {"num_key_value_heads": [1]}, {"head_dim": "x"}]
)
def test_inspect_says_which_heads_cannot_be_divided(own_code, tmp_path, stated):
    folder = edited(own_code("solar"), tmp_path / "x", config=lambda config: config.update(stated))
    assert inspect_checkpoint(folder).parallel.keys()


def test_routing_weights_of_ling_sum_to_one_by_default(own_code, tmp_path):
    """As in Bailing's config class; Ling 2 has no key for it."""
    for name in ("ling", "ling_2"):
        folder = edited(
            own_code(name), tmp_path / name, config=lambda config: config.pop("norm_topk_prob")
        )
        assert torch.equal(logits(folder), logits(own_code(name)))


def test_head_of_another_name_counts_against_the_tie(own_code, tmp_path):
    """InternLM2 calls it `output`. A head that differs from the embedding is used."""
    source = own_code("internlm2")
    stated = {"tie_word_embeddings": True}
    folder = edited(source, tmp_path / "x", config=lambda config: config.update(stated))
    assert torch.equal(logits(folder), logits(source))


@pytest.mark.parametrize("name", ["ling", "baichuan_13b"])
@pytest.mark.parametrize("quantized", [False, True])
def test_heads_of_weight_updates_are_normalized(own_code, tmp_path, name, quantized):
    """A trainer sends the head as it trains it, also to a file whose head is normalized."""
    folder, source = own_code(name), own_code(name)
    if quantized:
        folder, scheme = tmp_path / "x", Scheme.parse("w4a16-sym-g32")
        quantize_checkpoint(source, folder, scheme=scheme, recipe="rtn", progress=False)
    llm = LLM(folder, device="cpu", max_model_len=64)
    right, digests = llm.logits(TOKENS), llm.weight_digests()
    sent = load_file(source / "model.safetensors")
    llm.update_weights(sent)
    assert relative(llm.logits(TOKENS), right) < 1e-5
    assert llm.weight_digests() == digests
    norms = torch.linspace(1, 3, sent["lm_head.weight"].shape[1 - (name != "ling")])
    sent["lm_head.weight"] *= norms if name == "ling" else norms[:, None]
    llm.update_weights(sent)
    assert relative(llm.logits(TOKENS), right) < 1e-5


def test_empty_tensor_is_named(tiny_model, tmp_path):
    """Rows of a fused projection are read one range at a time, in the order of the kernel."""
    name = "model.layers.2.self_attn.output_gate.weight"

    def without_rows(state):
        state[name] = state[name][:0].clone()

    folder = edited(tiny_model("minimax"), tmp_path / "x", tensors=without_rows)
    with pytest.raises(InputError, match=f"^{name}: expected .128, 64. from config.json, found .0"):
        LLM(folder, device="cpu", max_model_len=64)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
)
@pytest.mark.parametrize("quantization", [None, "w4a16-sym-g32"])
def test_integer_tensors_as_weights_are_refused(own_code, tmp_path, name, quantization):
    """Codes in int32 under the name of a float weight, such as from a solver's own dump."""

    def stored_as_integers(state):
        state[name] = (state[name] * 10).to(torch.int32)

    folder = edited(own_code("solar"), tmp_path / "x", tensors=stored_as_integers)
    with pytest.raises(InputError, match=f"^{name}: expected floating point numbers, found torch"):
        LLM(folder, device="cpu", max_model_len=64, quantization=quantization)
