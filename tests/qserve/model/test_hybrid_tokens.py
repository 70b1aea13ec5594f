"""Families whose layers have states: logits and greedy tokens are transformers', wrong readings are
seen, and slots of states go from request to request."""

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from qkernels import ops
from qkernels.causal_conv.state import StateSlots
from qkernels.delta_net import reference as delta_reference
from qserve.llm import LLM
from qserve.model.blocks.delta_net import DeltaNet
from qserve.params.sampling_params import SamplingParams
from tests.qserve.model.test_expert_names import stacked
from tests.qserve.model.test_family_tokens import (
    check_greedy,
    count_preemptions,
    other_rotation,
    without_offset,
)
from tests.qserve.model.test_transformers import dense
from tests.qserve.model.variants import TOKENS, edited, logits, model_maker, relative
from tests.tiny_families import DELTA, MAMBA, SHORT_CONV, TINY_FAMILIES

DELTA_NETS = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
MAMBAS = ["granite_hybrid", "granite_hybrid_moe", "falcon_h1", "nemotron_h", "nemotron_h_moe"]
MAMBAS.append("bamba")
FAMILIES = [*DELTA_NETS, "lfm2", "lfm2_moe", *MAMBAS]
# what real checkpoints have that the usual tiny models have not
VARIANTS = {
    "qwen 3.5 with biases, two taps, tied": (
        "Qwen3_5TextConfig",
        {
            **DELTA,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "linear_conv_kernel_dim": 2,
            "layer_types": None,
            "full_attention_interval": 3,
        },
    ),
    "lfm2 with biases, two taps, as published": (
        "Lfm2Config",
        {
            **SHORT_CONV,
            "conv_bias": True,
            "conv_L_cache": 2,
            "layer_types": None,
            "full_attn_idxs": [1],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "granite 4 with rotations and biases": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            **{"shared_intermediate_size": 64, "num_local_experts": 0, "mamba_d_conv": 2},
            **{"mamba_n_groups": 1, "mamba_d_head": "auto", "time_step_limit": [0.2, 0.9]},
            **{"attention_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False},
            **{"position_embedding_type": "rope", "tie_word_embeddings": True},
        },
    ),
    "falcon-h1 without norm and factors, with biases": (
        "FalconH1Config",
        {
            **{name: value for name, value in MAMBA.items() if name != "layer_types"},
            **{"mamba_d_ssm": 128, "mamba_rms_norm": False, "mlp_bias": True},
            **{"projectors_bias": True, "mlp_multipliers": [1.6, 0.5]},
        },
    ),
    "falcon-h1, norm first": (
        "FalconH1Config",
        {
            **{name: value for name, value in MAMBA.items() if name != "layer_types"},
            **{"mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_conv_bias": False},
        },
    ),
    "nemotron-h with biases, its smallest steps": (
        "NemotronHConfig",
        {
            **TINY_FAMILIES["nemotron_h"][1],
            **{"use_bias": True, "mlp_bias": True, "time_step_min": 0.7},
        },
    ),
    "bamba with biases, three layers with attention": (
        "BambaConfig",
        {
            **{name: value for name, value in MAMBA.items() if name != "layer_types"},
            **{"attn_layer_indices": [0, 1, 3], "num_hidden_layers": 4, "mamba_d_head": "auto"},
            **{"attention_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False},
            **{"mlp_bias": True, "time_step_limit": [0.2, 0.9], "tie_word_embeddings": True},
        },
    ),
    "nemotron 3, one group, all kinds of layers": (
        "NemotronHConfig",
        {
            **TINY_FAMILIES["nemotron_h_moe"][1],
            **{"n_group": 1, "topk_group": 1, "mlp_bias": True, "norm_topk_prob": False},
            "layers_block_type": ["moe", "full_attention", "mlp", "linear_attention", "moe"],
        },
    ),
    "qwen3-next without experts, all of a head rotates": (
        "Qwen3NextConfig",
        {
            **TINY_FAMILIES["qwen3_next"][1],
            "mlp_only_layers": [0, 1, 2],
            "linear_num_key_heads": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
}
VARIANTS["nemotron 3 with a latent"] = TINY_FAMILIES["nemotron_h_latent"]
FEW_PAGES = {"num_gpu_blocks_override": 9, "admission": "fits", "block_size": 8, "max_num_seqs": 4}
MODES = {
    "whole": {},
    "chunked and preempted": {**FEW_PAGES, "max_num_batched_tokens": 11},
    "chunked": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
}


@pytest.fixture(scope="session")
def hybrid(tiny_model, tmp_path_factory):
    """Name of a family or of a variant -> its folder."""
    return model_maker(tiny_model, tmp_path_factory, VARIANTS)


def in_transformers(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompts(seed=3):
    rng = random.Random(seed)
    return [[rng.randrange(3, 512) for _ in range(n)] for n in (9, 17, 26, 30, 12, 1)]


def greedy(llm, prompts, num_tokens=10):
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_logits_equal_transformers(hybrid, name):
    folder = hybrid(name)
    with torch.no_grad():
        want = in_transformers(folder)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5


@pytest.mark.parametrize(
    ("name", "scheme", "output_format"),
    [
        ("qwen3_5", "w4a16-sym-g32", "compressed-tensors"),
        ("qwen3_5_moe", "w4a16-sym-g32", "compressed-tensors"),
        ("lfm2", "w4a16-sym-g32", "gptq"),
        ("lfm2_moe", "w4a16-sym-g32", "compressed-tensors"),
        ("granite_hybrid", "w4a16-sym-g32", "gptq"),
        ("falcon_h1", "w4a16-sym-g32", "gptq"),
        ("granite_hybrid_moe", "w4a16-sym-g32", "compressed-tensors"),
        ("nemotron_h", "w4a16-sym-g32", "gptq"),
        ("nemotron_h_moe", "w4a16-sym-g32", "compressed-tensors"),
        ("nemotron_h_latent", "w4a16-sym-g32", "compressed-tensors"),
        ("bamba", "w4a16-sym-g32", "gptq"),
        pytest.param("qwen3_next", "w4a16-sym-g32", "gptq", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_5", "w4a16-asym-g32", "awq", marks=pytest.mark.exhaustive),
    ],
)
def test_quantized_weights_are_what_they_mean(written, tmp_path, name, scheme, output_format):
    """Logits and tokens: whole, and with chunks and preemptions."""
    folder = written(scheme, output_format, name)
    model = in_transformers(dense(folder, tmp_path / "dense", torch.float32))
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5
    llm = LLM(folder, device="cpu", max_model_len=64, **MODES["chunked and preempted"])
    check_greedy(model, prompts(), greedy(llm, prompts()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name",
    [*FAMILIES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in VARIANTS)],
)
def test_greedy_tokens_equal_transformers(hybrid, monkeypatch, name, mode):
    folder = hybrid(name)
    llm = LLM(folder, device="cpu", max_model_len=64, **MODES[mode])
    poison(llm)
    preemptions = count_preemptions(llm, monkeypatch)
    outputs = greedy(llm, prompts())
    assert bool(preemptions) == ("num_gpu_blocks_override" in MODES[mode])
    states = llm.engine.scheduler.states
    assert states.num_free == states.num_slots
    check_greedy(in_transformers(folder), prompts(), outputs)


def poison(llm):
    """What no request has written is NaN."""
    for cache in llm.engine.runner.caches:
        for tensor in cache.slot_tensors:
            tensor.fill_(torch.nan)


def test_a_slot_goes_to_the_next_request(hybrid):
    """One after the other in one slot, and after one that was aborted amid its prompt."""
    folder = hybrid("qwen3_5")
    llm = LLM(folder, device="cpu", max_model_len=64, max_num_seqs=1, max_num_batched_tokens=5)
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    assert engine.scheduler.states.num_slots == 1
    engine.add_request("gone", [7] * 30, params)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.states.num_free == 0
    engine.abort("gone")
    assert engine.scheduler.states.num_free == 1
    check_greedy(in_transformers(folder), prompts(5), greedy(llm, prompts(5)))
    engine.scheduler.check_integrity()


def test_logits_of_a_sequence_leave_all_states_alone(hybrid):
    llm = LLM(hybrid("qwen3_5"), device="cpu", max_model_len=64)
    poison(llm)
    llm.logits(TOKENS)
    states = [c for c in llm.engine.runner.caches if isinstance(c, StateSlots)]
    assert len(states) == 2 and all(each.memory_PHKV.isnan().all() for each in states)
    assert all(each.conv_PCL.isnan().all() for each in states)


def test_a_token_is_never_computed_again(hybrid):
    """As rows are whose masks come late: those of such requests wait for the token before."""
    params = SamplingParams(
        bad_words=("x",), bad_words_token_ids=((5, 6),), max_tokens=4, detokenize=False
    )
    for name, waits in (("qwen3_5", True), ("qwen3", False)):
        engine = LLM(hybrid(name), device="cpu", max_model_len=64).engine
        engine.add_request("a", TOKENS, params)
        assert engine._requests["a"].follows_last == waits


def test_without_snapshots_no_prefix_is_found_and_that_is_said(hybrid, caplog):
    with caplog.at_level("INFO"):
        llm = LLM(
            hybrid("qwen3_5"), device="cpu", max_model_len=64, block_size=8, num_state_snapshots=0
        )
    assert "Prefix cache: off (the model has states; set --num-state-snapshots)" in caplog.text
    start = TOKENS * 3
    first, second = (greedy(llm, [start])[0].outputs[0].token_ids for _ in range(2))
    assert first == second and not llm.engine.scheduler.pool.num_cached


def test_pages_hold_layers_with_attention_alone(hybrid):
    runner = LLM(hybrid("qwen3_5"), device="cpu", max_model_len=64).engine.runner
    # one layer of 16 tokens, 2 KV heads of 32, keys and values in float32
    assert runner.bytes_per_page == 16 * 2 * 32 * 2 * 4
    states = [cache for cache in runner.caches if isinstance(cache, StateSlots)]
    held = sum(each.conv_PCL.nbytes + each.memory_PHKV.nbytes for each in states)
    assert runner.bytes_of_states == held > 0


LIMITS = [
    ({"pipeline_parallel_size": 2}, "pipeline-parallel-size"),
    ({"enable_lora": True}, "enable-lora"),
    ({"cpu_kv_cache_memory": 1e-5}, "cpu-kv-cache-memory.*do not hold the states.*max-num-seqs"),
]


@pytest.mark.parametrize(("settings", "message"), LIMITS, ids=[m.split(".")[0] for _, m in LIMITS])
def test_what_does_not_work_with_states_is_refused(hybrid, settings, message):
    with pytest.raises(InputError, match=f"--{message}"):
        LLM(hybrid("qwen3_5"), device="cpu", max_model_len=64, **settings)


def test_drafter_with_states_is_refused(hybrid, tiny_model, tmp_path):
    """Drafts are run ahead of the text, which its states cannot undo."""
    folders = []
    for name in ("qwen3_5", "qwen2"):
        folder = edited(
            hybrid("qwen3_5") if name == "qwen3_5" else tiny_model(name), tmp_path / name
        )
        vocabulary = {f"t{token}": token for token in range(512)}
        tokenizer = {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        folders.append(folder)
    config = {"method": "draft_model", "model": str(folders[0]), "num_speculative_tokens": 2}
    with pytest.raises(InputError, match="without recurrent states, found Qwen3_5ForCausalLM"):
        LLM(folders[1], device="cpu", max_model_len=64, speculative_config=json.dumps(config))


def test_pages_for_other_engines_need_snapshots(hybrid, tmp_path):
    extra = {"path": str(tmp_path)}
    config = {"kv_connector": "folder", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    settings = {"kv_transfer_config": json.dumps(config), "num_state_snapshots": 0}
    with pytest.raises(InputError, match="kv-transfer-config with --num-state-snapshots 0"):
        LLM(hybrid("qwen3_5"), device="cpu", max_model_len=64, **settings)


def test_layers_for_drafts_are_left_out(hybrid, tmp_path):
    """Qwen3.5 is published with a layer that predicts the token after the next."""
    source = hybrid("qwen3_5")
    extra = {"mtp.layers.0.input_layernorm.weight": torch.ones(64)}
    extra["mtp.fc.weight"] = torch.ones(64, 128)
    folder, quantized = edited(source, tmp_path / "x", lambda s: s.update(extra)), tmp_path / "q"
    assert torch.equal(logits(folder), logits(source))
    scheme = Scheme.parse("w4a16-sym-g32")
    quantize_checkpoint(folder, quantized, scheme=scheme, recipe="rtn", progress=False)
    reader = CheckpointReader(quantized)
    assert torch.equal(reader.get("mtp.fc.weight"), extra["mtp.fc.weight"])
    assert QuantConfig.from_dict(reader.config[BLOCK]).scheme_for("mtp.fc") is None
    assert logits(quantized).isfinite().all()


@pytest.mark.parametrize(
    ("name", "wrapper"), [("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe")]
)
def test_text_part_of_a_model_that_sees_pictures(hybrid, tmp_path, name, wrapper):
    """As Qwen3.5 is published: names below model.language_model, the config in text_config."""
    source = hybrid(name)

    def tensors(state):
        if wrapper == "Qwen3_5Moe":
            stacked(state)  # Qwen3.6 has one tensor for all experts
        for key in [key for key in state if key.startswith("model.")]:
            state[key.replace("model.", "model.language_model.", 1)] = state.pop(key)
        state["model.visual.blocks.0.norm1.weight"] = torch.ones(3)

    def config(value):
        text = {**value}
        del text["architectures"]
        value.clear()
        value.update(
            architectures=[f"{wrapper}ForConditionalGeneration"],
            model_type=name,
            text_config=text,
            dtype="float32",
        )

    folder = edited(source, tmp_path / "x", tensors, config)
    assert torch.equal(logits(folder), logits(source))


def test_model_of_states_alone_is_refused(hybrid, tmp_path):
    def all_states(value):
        value["layer_types"] = ["linear_attention"] * 3

    folder = edited(hybrid("qwen3_5"), tmp_path / "x", config=all_states)
    with pytest.raises(InputError, match="layer_types.*expected a layer with full attention"):
        logits(folder)


def test_heads_that_do_not_divide_are_refused(hybrid, tmp_path):
    folder = edited(
        hybrid("qwen3_5"), tmp_path / "x", config=lambda c: c.update(linear_num_key_heads=3)
    )
    with pytest.raises(InputError, match="linear_num_value_heads.*multiple of.*3, found 4"):
        logits(folder)


def mixers(wanted, change):
    """`change` of each layer's attention, or of each layer's net."""

    def plant(decoder, monkeypatch):
        for layer in decoder.layers:
            if isinstance(layer.attention, DeltaNet) == wanted:
                change(layer.attention)

    return plant


def nets(change):
    return mixers(True, change)


def attentions(change):
    return mixers(False, change)


def split_mixed(change):
    """`change` of (q, k, v, g, beta) as the state's update gets them."""

    def plant(decoder, monkeypatch):
        right = delta_reference.split_mixed
        monkeypatch.setattr(
            delta_reference, "split_mixed", lambda mixed, *rest: change(mixed, *right(mixed, *rest))
        )

    return plant


def any_length(mixed_TC, q, k, v, g, beta):
    """Queries and keys as long as they come."""
    H, K = q.shape[1:]
    qk = mixed_TC[:, : mixed_TC.shape[1] - v[0].numel()]
    lengths = qk.unflatten(1, (-1, K)).norm(dim=-1).chunk(2, 1)
    of_q, of_k = (x.repeat_interleave(H // x.shape[1], 1)[..., None] for x in lengths)
    return q * of_q, k * of_k, v, g, beta


def queries_unscaled(mixed_TC, q, k, v, g, beta):
    return q * q.shape[-1] ** 0.5, k, v, g, beta


def key_heads_in_turn(mixed_TC, q, k, v, g, beta):
    """Value head h reads key head h mod J, not h div (H / J)."""
    order = [0, 2, 1, 3]
    return q[:, order], k[:, order], v, g, beta


def conv_state(change):
    """`change` of what the convolution kept, before each step."""

    def plant(decoder, monkeypatch):
        right = ops.causal_conv_

        def wrong(x_TC, weight_CW, bias_C, conv_PCL, *others):
            conv_PCL.copy_(change(conv_PCL))
            return right(x_TC, weight_CW, bias_C, conv_PCL, *others)

        monkeypatch.setattr(ops, "causal_conv_", wrong)

    return plant


def memory(change):
    """`change` of the states, before each step."""

    def plant(decoder, monkeypatch):
        right = ops.delta_rule_

        def wrong(*args):
            args[5].copy_(change(args[5]))
            return right(*args)

        monkeypatch.setattr(ops, "delta_rule_", wrong)

    return plant


def gates_exchanged(net):
    net.gates.weight = torch.cat(net.gates.weight.chunk(2)[::-1])


def z_for_values(net):
    shape = net.shape
    qk, v, z = net.in_proj.weight.split([2 * shape.keys, shape.values, shape.values])
    net.in_proj.weight = torch.cat([qk, z, v])


def stored_by_head(attention):
    """All queries and then all gates, where the file has [query | gate] of each head."""
    H, D = attention.num_heads, attention.head_dim
    both, rest = attention.qkv_proj.weight.split([2 * H * D, attention.num_kv_heads * 2 * D])
    both = both.unflatten(0, (2, H, D)).transpose(0, 1).flatten(0, 2)
    attention.qkv_proj.weight = torch.cat([both, rest])


def gate_with_the_other_sign(attention):
    H, D = attention.num_heads, attention.head_dim
    attention.qkv_proj.weight[H * D : 2 * H * D] *= -1


def more_rotates(attention):
    attention.rotary.cos_sin = attention.rotary.cos_sin.repeat_interleave(2, 1)


def change_tensor(name, function):
    return nets(lambda net: setattr(net, name, function(getattr(net, name))))


WRONG = {
    "queries and keys of any length": split_mixed(any_length),
    "queries that are not scaled": split_mixed(queries_unscaled),
    "key heads in turn": split_mixed(key_heads_in_turn),
    "decay by half": split_mixed(lambda _, q, k, v, g, beta: (q, k, v, g / 2, beta)),
    "writes with the other sign": split_mixed(lambda _, q, k, v, g, beta: (q, k, v, g, -beta)),
    "decay without its bias": change_tensor("dt_bias", torch.zeros_like),
    "decay that is no logarithm": change_tensor("a_log", torch.exp),
    "norm of a net that adds 1": change_tensor("norm", lambda norm: norm + 1),
    "convolution a token late": change_tensor("conv_weight", lambda weight: weight.roll(1, 1)),
    "convolution in the other order": change_tensor("conv_weight", lambda weight: weight.flip(1)),
    "b and a exchanged": nets(gates_exchanged),
    "z taken for values": nets(z_for_values),
    "norms without their 1": lambda decoder, _: without_offset(decoder),
    "norms of heads without their 1": attentions(lambda each: each.q_norm.sub_(1)),
    "gate of attention by head": attentions(stored_by_head),
    "gate of attention with the other sign": attentions(gate_with_the_other_sign),
    "more of a head rotates": attentions(more_rotates),
    "neighbours rotate": lambda decoder, _: other_rotation(decoder.layers[1]),
}
# Seen where a request goes on alone.
WRONG_LATER = {
    "convolution that forgets": conv_state(torch.zeros_like),
    "convolution that remembers the oldest for the newest": conv_state(lambda c: c.flip(2)),
    "state that is forgotten": memory(torch.zeros_like),
    "state with its sides exchanged": memory(lambda s: s.transpose(2, 3).contiguous().view_as(s)),
    "state of another slot": memory(lambda s: s.roll(1, 0)),
}


@pytest.mark.parametrize("name", DELTA_NETS)
def test_a_wrong_reading_is_seen(hybrid, monkeypatch, name):
    """One start for all: a decoder is mended by the weights that it had."""
    llm = LLM(hybrid(name), device="cpu", max_model_len=64)
    decoder, right = llm.engine.runner.decoder, llm.logits(TOKENS)
    kept = {
        module: {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}
        for module in decoder.modules()
    }
    for wrong, plant in WRONG.items():
        with monkeypatch.context() as patch, torch.inference_mode():
            plant(decoder, patch)
            assert relative(llm.logits(TOKENS), right) > 1e-3, wrong
        for module in decoder.modules():
            for buffer, value in kept[module].items():
                setattr(module, buffer, value.clone())
        for layer in decoder.layers:
            if not isinstance(layer.attention, DeltaNet):
                layer.attention.rotary.interleaved = False
        assert relative(llm.logits(TOKENS), right) == 0, f"not mended: {wrong}"


def test_a_state_that_is_read_wrong_is_seen(hybrid, monkeypatch):
    """By the tokens of requests that go on, from chunk to chunk and from token to token."""
    llm = LLM(hybrid("qwen3_5"), device="cpu", max_model_len=64, **MODES["chunked"])

    def tokens():
        return [output.outputs[0].token_ids for output in greedy(llm, prompts()[1:4], 4)]

    right = tokens()
    for wrong, plant in WRONG_LATER.items():
        with monkeypatch.context() as patch:
            plant(llm.engine.runner.decoder, patch)
            assert tokens() != right, wrong
    assert tokens() == right
