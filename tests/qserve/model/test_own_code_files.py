"""Families whose code is in the model's folder: quantized files, ranks, inspection, config.json."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import normalize

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.convert import convert_checkpoint
from formats.errors import InputError
from formats.families import FAMILIES
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from qserve.llm import LLM
from qserve.model.model_config import ModelConfig
from qserve.model.rank_shards import check_ranks
from qserve.params.sampling_params import SamplingParams
from tests.own_code.models import TINY_MODELS, baichuan, lightning_ling, solar, write
from tests.own_code.references import Reference
from tests.qserve.model.test_own_code_tokens import check_greedy
from tests.qserve.model.test_transformers import dense
from tests.qserve.model.variants import TOKENS, edited, logits, relative
from tests.qserve.parallel.test_sharing import assert_sharded

exhaustive = pytest.mark.exhaustive
FEW = ("internlm2", "ling_2", "solar")
MOST = [name if name in FEW else pytest.param(name, marks=exhaustive) for name in TINY_MODELS]


# layer norms, routers and norms of branches do not commute with rotations
NOT_ROTATED = {
    *("orion", "plamo2", "plamo3", "ling", "ling_2", "sarvam", "ling_2_6", "ring_linear"),
    *("deepseek_moe", "sarvam_mla"),
}


@pytest.fixture(scope="session")
def solved(own_code, made_once):
    """(name, recipe, scheme) -> folder of a tiny model, calibrated on random tokens."""

    def made(name, recipe, scheme="w4a16-sym-g32"):
        ids_WS = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0))
        return made_once(
            f"own-code-{name}-{recipe}-{scheme}",
            lambda folder: quantize_checkpoint(
                own_code(name),
                folder,
                scheme=Scheme.parse(scheme),
                output_format="gptq",
                recipe=recipe,
                calibration=CalibrationData(ids_WS=ids_WS, source="test", seed=0),
                progress=False,
            ),
        )

    return made


def reference_of(folder, target):
    """The reference of what the codes of a folder mean."""
    return Reference(dense(folder, target, torch.float32))


@pytest.mark.parametrize("name", MOST)
def test_tokens_of_solved_weights(solved, tmp_path, name):
    folder, rng = solved(name, "gptq"), random.Random(5)
    assert any(entry.endswith(".qweight") for entry in CheckpointReader(folder).entries)
    prompts = [[rng.randrange(3, 512) for _ in range(n)] for n in (9, 17, 26)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    llm = LLM(folder, device="cpu", max_model_len=64, max_num_batched_tokens=11)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check_greedy(reference_of(folder, tmp_path / "x"), prompts, outputs)


@pytest.mark.parametrize("name", [pytest.param(name, marks=exhaustive) for name in TINY_MODELS])
def test_logits_of_moved_scales(solved, tmp_path, name):
    """AWQ moves factors between norms, values and up projections and the linears after them."""
    folder = solved(name, "awq")
    want = reference_of(folder, tmp_path / "x").logits(TOKENS)
    assert relative(logits(folder), want) < 1e-5


@exhaustive
@pytest.mark.parametrize("name", [n for n in TINY_MODELS if n not in NOT_ROTATED])
def test_rotations_change_no_logits(solved, own_code, name):
    """The rotated float model computes what the model does: 8-bit codes show no more than noise."""
    assert relative(logits(solved(name, "rotate", "w8a16-sym-g32")), logits(own_code(name))) < 0.1


@pytest.mark.parametrize("name", MOST)
def test_files_pass_inspection_and_convert(solved, own_code, tmp_path, name):
    folder = solved(name, "gptq")
    convert_checkpoint(folder, tmp_path / "x", "compressed-tensors")
    for each in (own_code(name), folder, tmp_path / "x"):
        found = inspect_checkpoint(each)
        assert all("has no tokenizer" in problem.text for problem in found.problems), found.problems
        ours = next(v for v in found.loads_in if v.program == "this project")
        assert ours.answer == "yes"
    assert torch.equal(logits(tmp_path / "x"), logits(folder))
    stated, written = (
        json.loads((each / "config.json").read_text()) for each in (own_code(name), folder)
    )
    kept = ("head_dim", "rope_scaling") if name == "sarvam_mla" else ()
    for key in ("architectures", "model_type", *kept):
        assert written[key] == stated[key]


@pytest.mark.parametrize(
    ("name", "four_bits"),
    [
        *((name, False) for name in TINY_MODELS),
        *(pytest.param(name, True, marks=exhaustive) for name in TINY_MODELS),
    ],
)
def test_two_ranks_equal_one(own_code, solved, name, four_bits):
    folder = solved(name, "gptq") if four_bits else own_code(name)
    check_ranks(ModelConfig.from_folder(folder), 2, 1)
    assert_sharded(folder, 2)


def test_ranks_have_whole_groups_of_a_norm(own_code):
    """Two groups of two heads; four ranks would have half a group each."""
    decoders = assert_sharded(own_code("ling_2_6"), 2)
    mixers = [decoder.layers[0].attention for decoder in decoders]
    assert [(mixer.heads, mixer.norm_groups) for mixer in mixers] == [(2, 1), (2, 1)]
    folder = own_code("ling_2_6")
    with pytest.raises(InputError, match="-size 4: the norm of .* has 2 groups, and a rank needs"):
        check_ranks(ModelConfig.from_folder(folder), 4, 1)
    assert "2 groups" in inspect_checkpoint(folder).parallel[4]


def test_one_norm_for_all_heads_is_summed_over_ranks(tmp_path):
    made = lightning_ling(group_norm_size=1)
    decoders = assert_sharded(write(tmp_path / "x", made), 2)
    assert all(decoder.layers[0].attention.norm_over_ranks for decoder in decoders)


def test_other_numbers_of_rotated_channels_are_not_calibrated(tmp_path):
    folder = write(tmp_path / "x", lightning_ling(partial_rotary_factor=1.0))
    assert relative(logits(folder), Reference(folder).logits(TOKENS)) < 1e-5
    data = CalibrationData(ids_WS=torch.full((2, 8), 5), source="test", seed=0)
    with pytest.raises(InputError, match="rotates 24 channels of a head, latent attention 12"):
        quantize_checkpoint(
            folder,
            tmp_path / "y",
            scheme=Scheme.parse("w4a16-sym-g32"),
            recipe="gptq",
            calibration=data,
            progress=False,
        )


def test_layers_that_mix_inputs_are_on_one_stage(own_code):
    config = ModelConfig.from_folder(own_code("solar"))
    with pytest.raises(InputError, match="pipeline-parallel-size 2: .*skip connections"):
        check_ranks(config, 1, 2)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"bskcn_tv": None}, "bskcn_tv: expected two numbers, found None"),
        ({"bskcn_1": "1"}, "bskcn_1: expected numbers of layers, found '1'"),
        ({"bskcn_1": [-1]}, r"bskcn_1: expected numbers of layers, found \[-1\]"),
        (
            {"bskcn_2": [3], "bskcn_4": [1]},
            r"bskcn_4: expected layers from bskcn_2 on, found \[1\]",
        ),
    ],
)
def test_invalid_skip_connections_are_refused(tmp_path, stated, message):
    folder = write(tmp_path / "x", solar(**stated))
    with pytest.raises(InputError, match=f"config.json {message}"):
        LLM(folder, device="cpu", max_model_len=64)


def test_normalized_head_is_written(solved, own_code):
    """config.json says so. Programs that normalize it again change no more than last bits."""
    for name, dim in (("ling", 0), ("baichuan_13b", 1)):
        assert json.loads((solved(name, "rtn") / "config.json").read_text())["norm_head"] is False
        source = load_file(own_code(name) / "model.safetensors")["lm_head.weight"]
        written = load_file(solved(name, "rtn") / "model.safetensors")["lm_head.weight"]
        assert torch.allclose(written, normalize(source, dim=dim), atol=1e-6)
        assert torch.allclose(written, normalize(written, dim=dim), atol=1e-6)


def test_both_sizes_of_baichuan_2_have_one_architecture():
    """7B rotates, 13B has ALiBi; the first generation's 7B has a name of its own."""
    row = FAMILIES["BaichuanForCausalLM"]
    small, large = (row.variant({"hidden_size": size}) for size in (4096, 5120))
    assert (small.rope, small.alibi) == ("all", False)
    assert (large.rope, large.alibi) == ("none", True)


@pytest.mark.parametrize(("tokens", "normalized"), [(64000, False), (125696, True)])
def test_baichuan_version_is_detected_by_vocabulary(tmp_path, tokens, normalized):
    made = baichuan(6, architectures=["BaichuanForCausalLM"], vocab_size=tokens)
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(made[0]))
    config = ModelConfig.from_folder(folder)
    assert config.values["norm_head"] is normalized
    assert config.context.length == 256


def test_lengths_beyond_which_keys_would_change_are_refused(own_code):
    """Qwen 1 and InternLM2 scale their rotation with the length of the text."""
    assert ModelConfig.from_folder(own_code("qwen")).context.length == 128
    with pytest.raises(InputError, match="--max-model-len: .*257|dynamic rope scaling"):
        LLM(own_code("internlm2"), device="cpu", max_model_len=257)


@pytest.mark.parametrize(
    ("name", "stated", "key"),
    [
        ("qwen", {"visual": {"width": 1664}}, "visual"),
        ("qwen", {"no_bias": False}, "no_bias"),
        ("ling", {"use_bias": True}, "use_bias"),
        ("ling", {"multi_gate": True}, "multi_gate"),
        ("plamo2", {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ("plamo3", {"scale_embedding": True}, "scale_embedding"),
        ("ling_2", {"score_function": "softmax"}, "score_function"),
        ("ling_2", {"router_type": "MultiRouter"}, "router_type"),
        ("ling_2_6", {"use_qkv_bias": True}, "use_qkv_bias"),
        ("ring_linear", {"norm_head": True}, "norm_head"),
    ],
)
def test_unsupported_variants_are_refused(own_code, tmp_path, name, stated, key):
    folder = edited(own_code(name), tmp_path / "x", config=lambda config: config.update(stated))
    with pytest.raises(InputError, match=rf"config\.json {key}: expected .*not supported"):
        LLM(folder, device="cpu", max_model_len=64)


def test_other_keys_of_plamo_2(own_code, tmp_path):
    """A rotation as transformers 5 writes it, another name of the class, and missing defaults."""

    def change(config):
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
        config["architectures"] = ["PLaMo2ForCausalLM"]
        for key in ("mamba_step", "mamba_d_conv", "mamba_enabled"):
            del config[key]

    folder = edited(own_code("plamo2"), tmp_path / "x", config=change)
    assert torch.equal(logits(folder), logits(own_code("plamo2")))


def test_rotations_and_windows_of_plamo_2(own_code, tmp_path):
    """Published files of the first release state no theta, and no layer without a window."""

    def change(config):
        for key in ("rope_theta", "rope_local_theta", "full_attention_idx"):
            del config[key]

    folder = edited(own_code("plamo2"), tmp_path / "x", config=change)
    config = ModelConfig.from_folder(folder)
    assert config.windows == (None, 7, None, 7)
    assert [rope and rope.theta for rope in config.ropes] == [None, 10000, None, 10000]
    folder = edited(folder, tmp_path / "y", config=lambda config: config.update(rope_theta=500))
    assert ModelConfig.from_folder(folder).ropes[1].theta == 500


@pytest.mark.parametrize("windows", [7, [7, None, 7]])
def test_other_keys_of_plamo_3_for_its_windows(own_code, tmp_path, windows):
    def change(config):
        del config["window_size"]
        config["sliding_window"] = windows

    folder = edited(own_code("plamo3"), tmp_path / "x", config=change)
    assert torch.equal(logits(folder), logits(own_code("plamo3")))


def test_plamo_3_with_windows_that_differ_is_refused(own_code, tmp_path):
    stated = {"sliding_window": [7, None, 9], "window_size": [7, None, 9]}
    folder = edited(own_code("plamo3"), tmp_path / "x", config=lambda c: c.update(stated))
    with pytest.raises(InputError, match=r"config\.json sliding_window: expected the same window"):
        LLM(folder, device="cpu", max_model_len=64)


def test_longer_contexts_of_plamo_3(own_code, tmp_path):
    """Only layers that see all keys stretch their rotation."""
    stated = {"rope_scaling_factor": 4, "initial_context_length": 256}
    folder = edited(own_code("plamo3"), tmp_path / "x", config=lambda c: c.update(stated))
    local, whole, _ = ModelConfig.from_folder(folder).ropes
    assert (local.type, local.theta, whole.type, whole.theta) == ("default", 100, "yarn", 1000)


def test_special_tokens_are_only_those_that_are_stated(own_code):
    """The config class whose defaults are read has others."""
    assert ModelConfig.from_folder(own_code("ling")).eos_token_ids == frozenset()


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_tokens_on_a_gpu(solved, name, eager):
    """In bfloat16, also in CUDA graphs: a wrong reading differs by far more than rounding."""
    folder = solved(name, "rtn")
    on_cpu = LLM(folder, device="cpu", max_model_len=64)
    on_gpu = LLM(
        folder,
        device="cuda",
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=2,
        num_gpu_blocks_override=64,  # others may use the GPU as well
        enforce_eager=eager,
    )
    # rounding may change which experts of a group a token gets
    limit, behind = (0.4, 0.5) if name == "ling_2" else (0.1, 0.3)
    assert relative(on_gpu.logits(TOKENS).cpu(), on_cpu.logits(TOKENS)) < limit
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    (output,) = on_gpu.generate([TOKENS], params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    logits_TV = on_cpu.logits(TOKENS + tokens)[-9:-1]
    chosen_T = logits_TV[torch.arange(8), torch.tensor(tokens)]
    behind_T = (logits_TV.amax(-1) - chosen_T) / (logits_TV.amax(-1) - logits_TV.mean(-1))
    assert behind_T.max() < behind, "far from the largest"
