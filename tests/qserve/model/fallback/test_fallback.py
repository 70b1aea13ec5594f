"""Models without a row here, through transformers: its tokens, or a reason."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.layouts import decode_linear
from formats.quant_config import QuantConfig
from qserve import LLM, SamplingParams
from qserve.cli import main
from qserve.model.fallback.quantize import linear_names

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Larger than usual: the outputs of a random model then differ from token to token.
    "initializer_range": 0.2,
}
# model type -> what its config needs besides; each has something of its own
RUN = {
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "bitnet": {},
    "persimmon": {},
    "modernbert-decoder": {},
    "jetmoe": {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    # two blocks of attention in a layer, and experts that return what they read
    "longcat_flash": {
        **{"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 3},
        **{"n_routed_experts": 4, "zero_expert_num": 2, "num_key_value_heads": 4, "head_dim": 8},
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 16},
        **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    },
    "beam": {},
    "ctrl": {},  # sinusoids as positions
}
# sizes that follow from others
DERIVED = {"longcat_flash": ("intermediate_size", "num_hidden_layers")}
# Families with a row, which run so on request
WITH_ROW = {
    "olmo": {},  # norms without factors
    "cohere2_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    # sinks
    "flint": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "kolibri1": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    # keys wider than values
    "axk1": {
        **{"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 16},
        **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
        **{"n_group": 1, "topk_group": 1},
    },
    "granite_swa": {
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
QUANTIZED = ["bitnet", "persimmon"]
REFUSED = {
    "bert": "hidden states differ from those of its own attention",
    "diffllama": "a layer calls attention twice",
    "doge": "its attention has a mask of its own",
    "minimax": "2 of its 3 layers call attention",
    "mamba": "does not call attention",
    "cpmant": "does not call attention through transformers' attention interface",
    "olmo_hybrid": "does not call attention through transformers' attention interface",
    "moshi": "its sliding_window of 3000 is not passed to attention",
    "hrm_text": "a layer calls attention twice",
    "dots3_note_text": "num_attention_heads: differs between layers, which is not supported",
}
STATES = {
    "minimax": {
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "num_local_experts": 4,
    },
    "dots3_note_text": {
        **{"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "shared_experts_intermediate_size": 32},
        **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "head_dim": 24},
        **{"qk_rope_head_dim": 8, "v_head_dim": 16, "index_n_heads": 4, "index_head_dim": 16},
        **{"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_v_head_dim": 16},
        **{"swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_qk_rope_head_dim": 8},
    },
}
LENGTH, NEW = 40, 16
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
# prompts are cut, two requests share steps, and the third finds pages of the first
SETTINGS = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "num_gpu_blocks_override": 64}


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Model type -> folder of a tiny random model."""
    folders = {}

    def make(kind):
        if kind not in folders:
            sizes = {k: v for k, v in SIZES.items() if k not in DERIVED.get(kind, ())}
            sizes |= RUN.get(kind, {}) | STATES.get(kind, {}) | WITH_ROW.get(kind, {})
            torch.manual_seed(1)
            config = transformers.AutoConfig.for_model(kind, **sizes)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            folders[kind] = tmp_path_factory.mktemp("fallback") / kind
            model.save_pretrained(folders[kind])
        return folders[kind]

    return make


def prompts():
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 250, (2, LENGTH), generator=generator).tolist()


def expected(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        tokens = model.generate(
            torch.tensor(prompts()), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
    return tokens[:, LENGTH:].tolist()


def tokens_of(folder, **settings):
    llm = LLM(str(folder), device="cpu", dtype="float32", **SETTINGS | settings)
    first = llm.generate(prompts(), GREEDY, use_tqdm=False)
    again = llm.generate(prompts()[0], GREEDY, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in [*first, *again]]
    assert again[0].num_cached_tokens >= 32, "the prefix cache found nothing"
    llm.close()
    return found


def check(folder, reference, **settings):
    want = expected(reference)
    assert len({*want[0], *want[1]}) > 2, "or it tests less than it says"
    assert tokens_of(folder, **settings) == [*want, want[0]]


def some(names, *usual):
    """These in the usual run, and the others where there is time."""
    return [
        name if name in usual else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in names
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", some([*RUN, *WITH_ROW], "aria_text", "flint", "olmo"))
def test_tokens_equal_transformers(made, kind):
    check(made(kind), made(kind), model_impl="transformers" if kind in WITH_ROW else "auto")


def test_preempted_requests_are_recomputed(made):
    small = {"num_gpu_blocks_override": 6, "admission": "fits"}
    check(made("granite_swa"), made("granite_swa"), model_impl="transformers", **small)


def test_family_with_row_runs_through_transformers_on_request(tiny_model):
    folder = tiny_model("qwen3")
    own = tokens_of(folder)
    assert tokens_of(folder, model_impl="transformers") == own
    assert tokens_of(folder, model_impl="transformers", speculative_config=NGRAM) == own


NGRAM = '{"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}'


def dequantized(folder, source, target):
    """The float model whose linears have the values that the codes mean."""
    reader = CheckpointReader(folder)
    quant = QuantConfig.from_dict(reader.config["quantization_config"])
    shutil.copytree(source, target)
    state = load_file(target / "model.safetensors")
    num_changed = 0
    for name in state:
        module = name.removesuffix(".weight")
        if name in reader:
            continue
        own = {
            key.removeprefix(f"{module}."): reader.get(key)
            for key in reader.entries
            if key.startswith(f"{module}.")
        }
        state[name] = decode_linear(module, own, quant).dequantize().contiguous()
        num_changed += 1
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return num_changed


@pytest.mark.parametrize("kind", some(QUANTIZED, "bitnet", "persimmon"))
def test_quantized_tokens_equal_those_of_the_codes_values(made, kind, tmp_path, capsys):
    source = made(kind)
    arguments = ["quantize", str(source), "--scheme", "w4a16-sym", "--group-size", "32"]
    assert main([*arguments, "--recipe", "rtn", "-o", str(tmp_path / "q")]) == 0
    assert dequantized(tmp_path / "q", source, tmp_path / "float") == len(linear_names(source))
    check(tmp_path / "q", tmp_path / "float")


def test_recipes_with_data_require_family_row(made, tmp_path, capsys):
    arguments = [
        "quantize",
        str(made("bitnet")),
        "--scheme",
        "w4a16-sym",
        "-o",
        str(tmp_path / "q"),
    ]
    assert main([*arguments, "--recipe", "awq"]) == 1
    assert "--recipe: " in (found := capsys.readouterr().err) and "--recipe rtn or gptq" in found
    assert main([*arguments, "--recipe", "rtn", "--override", "a=w8a16-sym"]) == 1
    assert "--override: " in capsys.readouterr().err
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("kind", some(REFUSED, "bert", "minimax", "mamba"))
def test_unsupported_models_are_refused_with_reason(made, kind):
    with pytest.raises(InputError, match=REFUSED[kind]):
        LLM(str(made(kind)), device="cpu", dtype="float32", model_impl="transformers")


def edited(folder, target, **fields):
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_bias_is_detected(made, monkeypatch, dtype):
    """Planted in transformers' own attention: what the paged cache does not compute is refused."""
    from transformers.models.olmo import modeling_olmo

    eager = modeling_olmo.eager_attention_forward

    def biased(module, query, key, value, mask, *arguments, **options):
        steps = torch.arange(key.shape[2], dtype=query.dtype)
        return eager(module, query, key, value, mask + 0.1 * steps, *arguments, **options)

    monkeypatch.setattr(modeling_olmo, "eager_attention_forward", biased)
    with pytest.raises(InputError, match="differ from those of its own attention"):
        LLM(str(made("olmo")), device="cpu", dtype=dtype, model_impl="transformers")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_outside_kv_pages_is_detected(made, monkeypatch, dtype):
    """Each token of an MLP reads the token before it, which a later step does not have."""
    from transformers.models.olmo import modeling_olmo

    forward = modeling_olmo.OlmoMLP.forward

    def shifted(self, x):
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return forward(self, x + before)

    monkeypatch.setattr(modeling_olmo.OlmoMLP, "forward", shifted)
    with pytest.raises(InputError, match="differ from those of its own attention"):
        LLM(str(made("olmo")), device="cpu", dtype=dtype, model_impl="transformers")


def test_16_bit_weights_run(made):
    """Their rounding is no difference from transformers' attention."""
    for kind in ("bitnet", "aria_text", "flint"):
        LLM(str(made(kind)), device="cpu", dtype="bfloat16").close()


def test_unsupported_settings_are_refused(made, tmp_path):
    folder = str(made("bitnet"))
    for settings, words in (
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: .*BitNet.*attn_sub_norm"),
        ({"enable_lora": True}, "--enable-lora: does not work"),
        ({"load_format": "dummy"}, "--load-format dummy"),
        ({"quantization": "w4a16"}, "--quantization: does not work"),
        ({"model_impl": "native"}, "expected one of .*served architectures"),
    ):
        with pytest.raises(InputError, match=words):
            LLM(folder, device="cpu", **settings)
    chunked = edited(folder, tmp_path / "chunked", attention_chunk_size=8)
    with pytest.raises(InputError, match="attention_chunk_size: attention in chunks"):
        LLM(chunked, device="cpu")


def test_sleep_and_updates_are_refused_and_model_continues(made):
    llm = LLM(str(made("bitnet")), device="cpu", dtype="float32", **SETTINGS)
    want = llm.generate(prompts()[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    for call in (lambda: llm.sleep(level=1), lambda: llm.update_weights({}), llm.weight_digests):
        with pytest.raises(InputError, match="sleep and new weights: do not work with BitNet"):
            call()
    assert llm.generate(prompts()[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == want


def test_log_probabilities_of_a_prompt_equal_transformers(made):
    """Logits of all rows of a prompt, not only of the last one."""
    folder, prompt = made("flint"), prompts()[0]
    llm = LLM(str(folder), device="cpu", dtype="float32", **SETTINGS)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = llm.generate(prompt, params, use_tqdm=False)[0].prompt_logprobs
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for row, (token, each) in enumerate(zip(prompt[1:], found[1:], strict=True)):
        assert each[token].logprob == pytest.approx(want[row, token].item(), abs=1e-4)


def test_mismatched_files_are_refused(made, tmp_path):
    folder = tmp_path / "less"
    shutil.copytree(made("bitnet"), folder)
    state = load_file(folder / "model.safetensors")
    gone = state.pop("model.layers.1.mlp.up_proj.weight")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"model.layers.1.mlp.up_proj.weight is missing"):
        LLM(str(folder), device="cpu")
    state |= {"model.layers.1.mlp.up_proj.weight": gone, "odd.weight": gone.clone()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"odd.weight is not used"):
        LLM(str(folder), device="cpu")
