"""Folders of other tools run as transformers runs the weights that their tools see in them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from formats.checkpoint import CheckpointReader
from formats.inspection.inspect import inspect_checkpoint
from formats.layouts import decode_dense, is_quantized, layout_of, tensor_names
from formats.quant_config import BLOCK, QuantConfig, find_block
from qserve.llm import LLM
from qserve.model.loading.dummy_source import DummySource
from qserve.model.loading.weight_source import WeightSource
from qserve.model.model_config import ModelConfig
from tests.formats.inspection.findings import of_weights
from tests.formats.made_by.expected import expected_digests, expected_weights
from tests.formats.made_by.makers.digest import digest
from tests.qserve.model.variants import edited, logits, relative

MADE_BY = Path(__file__).resolve().parents[2] / "formats" / "made_by"
# whose inputs stay in 16 bits here; True: no kernel takes the codes
FOLDERS = {
    "bitsandbytes-nf4": True,
    "bitsandbytes-fp4": True,
    "bitsandbytes-int8": False,
    "torchao-int4": False,
    "torchao-fp8": False,
    "torchao-tiles": True,
    "hqq-w3": True,
    "hqq-w4": True,
    "llmcompressor-mixtral-w4a16": False,
    "llmcompressor-qwen3-5-moe-w4a16": False,
    "llmcompressor-qwen3-moe-nvfp4": False,
}
IDS = [3, 17, 20, 5, 9, 60, 41, 30, 8, 1, 2, 50]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Each linear's weight as the tool sees it; where a folder has digests alone, those of ours."""
    if (folder / "expected.tensors").exists():
        return expected_weights(folder)
    reader, found = CheckpointReader(folder), {}
    config = QuantConfig.from_dict(find_block(folder, reader.config))
    dtype = getattr(torch, json.loads((folder / "made.json").read_text()).get("dtype", "float32"))
    for name, expected in expected_digests(folder).items():
        names = tensor_names(name, layout_of(config), reader.entries)
        tensors = {field: reader.get(each) for field, each in names.items()}
        found[name] = decode_dense(name, tensors, config).weight_NK
        assert digest(found[name].to(dtype)) == expected, name
    return found


def by_transformers(folder: Path, work: Path, rounding=None) -> torch.Tensor:
    """Logits of the float model that has what the tool dequantizes, and all other tensors.

    `rounding`: of the inputs of quantized linears.
    """
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key != BLOCK}
    reader = CheckpointReader(folder)
    weights = weights_of(folder)
    state = {f"{name}.weight": tensor for name, tensor in weights.items()}
    for name in reader.entries:
        module = name.rpartition(".")[0]
        if not is_quantized(module, reader.entries) and "_proj." not in name:
            state[name] = reader.get(name)
    work.mkdir()
    (work / "config.json").write_text(json.dumps(config))
    floats = {name: tensor.float().contiguous() for name, tensor in state.items()}
    save_file(floats, work / "model.safetensors", metadata={"format": "pt"})
    model, report = AutoModelForCausalLM.from_pretrained(
        work, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, module in model.named_modules():
        if rounding is not None and is_quantized(name, reader.entries):
            module.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]),))
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_equal_tool_weights(name, tmp_path):
    llm = LLM(MADE_BY / name, device="cpu", dtype="float32", max_model_len=32)
    made = json.loads((MADE_BY / name / "made.json").read_text())
    # weights that the tool rounds to bfloat16
    limit = 4e-3 if made.get("dtype") == "bfloat16" else 1e-3
    assert relative(llm.logits(IDS), by_transformers(MADE_BY / name, tmp_path / "float")) < limit


def to_int8(x):
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
    return (x / scale).round() * scale


def to_float8(x):
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


W4A8 = {
    "llmcompressor-w4a8": to_int8,
    "llmcompressor-w4a8-packed": to_int8,
    "llmcompressor-w4afp8": to_float8,
}


@pytest.mark.parametrize("name", W4A8)
def test_4_bit_weights_take_inputs_rounded_by_token(name, tmp_path):
    """Nearer to the float model of rounded inputs than to that of inputs as they are."""
    folder = MADE_BY / name
    llm = LLM(folder, device="cpu", dtype="float32", max_model_len=32)
    found = llm.logits(IDS)
    rounded = relative(found, by_transformers(folder, tmp_path / "rounded", W4A8[name]))
    as_they_are = relative(found, by_transformers(folder, tmp_path / "float"))
    assert rounded < 1e-5
    assert as_they_are > 2e-3, "the roundings of x show"


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_run_on_codes_where_a_kernel_takes_them(name):
    config = ModelConfig.from_folder(MADE_BY / name)
    source = WeightSource(CheckpointReader(MADE_BY / name), config)
    module = "model.layers.0.self_attn.q_proj"
    assert source.is_quantized(module) != FOLDERS[name]
    assert source.stays_in_float(module) == FOLDERS[name]


def hqq_tensors(N: int, K: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A linear of 4-bit codes in groups of 32 inputs as HQQ stores it, and its weight [N, K]."""
    generator = torch.Generator().manual_seed(seed)
    groups = N * K // 32
    codes = torch.randint(16, (groups, 32), generator=generator).to(torch.uint8)
    scale = (torch.rand(groups, 1, generator=generator) / 50 + 0.01).to(torch.float16)
    zero = (torch.rand(groups, 1, generator=generator) + 7).to(torch.float16)
    tensors = {
        "W_q": codes[: groups // 2] << 4 | codes[groups // 2 :],
        "scale": scale,
        "zero": zero,
    }
    settings = {"nbits": 4, "group_size": 32, "axis": 1, "shape": [N, K]}
    tensors |= {field: torch.tensor(value) for field, value in settings.items()}
    return tensors, ((codes - zero) * scale).reshape(N, K)


def test_experts_whose_codes_no_kernel_takes_under_other_names(tiny_model, tmp_path):
    """HQQ's experts have no tensor called `weight`; llm-compressor's names are not Mixtral's."""
    leaves = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

    def change(state, codes):
        places = [name for name in state if ".experts." in name]
        for seed, name in enumerate(places):
            tensors, weight = hqq_tensors(*state[name].shape, seed)
            if not codes:
                state[name] = weight
                continue
            del state[name]
            module, leaf = name.removesuffix(".weight").rsplit(".", 1)
            state |= {f"{module}.{leaves[leaf]}.{field}": t for field, t in tensors.items()}

    def block(config):
        parameters = {"weight_quant_params": {"nbits": 4, "group_size": 32, "axis": 1}}
        linears = {f"mlp.experts.{e}.{leaf}": parameters for e in range(4) for leaf in leaves}
        config[BLOCK] = {"quant_method": "hqq", "quant_config": linears}

    source = tiny_model("mixtral")
    floats = edited(source, tmp_path / "float", lambda state: change(state, codes=False))
    folder = edited(source, tmp_path / "hqq", lambda state: change(state, codes=True), block)
    assert torch.equal(logits(folder), logits(floats))
    assert not of_weights(inspect_checkpoint(folder))


def test_kv_cache_of_modelopt_without_scales_loads_and_is_a_warning(tmp_path):
    folder = tmp_path / "modelopt"
    shutil.copytree(MADE_BY / "modelopt-fp8", folder)
    tensors = load_file(folder / "model.safetensors")
    whole = {name: t for name, t in tensors.items() if not name.endswith(("k_scale", "v_scale"))}
    assert len(whole) < len(tensors)
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    report = inspect_checkpoint(folder)
    found = [problem for problem in report.problems if "KV cache" in str(problem)]
    assert [problem.severity for problem in found] == ["warning"]
    assert report.loads_in[0].answer in ("yes", "slow")
    llm = LLM(folder, device="cpu", dtype="float32", max_model_len=32)
    assert bool(torch.isfinite(llm.logits(IDS)).all())


@pytest.mark.parametrize(
    "name", ["auto-round-nvfp4", "auto-round-mxfp4", "quark-mxfp4", "modelopt-nvfp4"]
)
def test_dummy_weights_of_4_bit_floats_have_the_form_of_loaded_ones(name):
    config = ModelConfig.from_folder(MADE_BY / name)
    source = WeightSource(CheckpointReader(MADE_BY / name), config)
    dummies = DummySource(config, torch.device("cpu"), 0)
    module = "model.layers.0.mlp.up_proj"
    loaded, dummy = (each.weight(module, (128, 64)) for each in (source, dummies))
    assert type(dummy) is type(loaded) and dummy.spec == loaded.spec
    for field in ("bytes_NB", "scales_NG"):
        one, other = getattr(loaded, field), getattr(dummy, field)
        assert (one.shape, one.dtype) == (other.shape, other.dtype), field
    llm = LLM(MADE_BY / name, device="cpu", max_model_len=32, load_format="dummy")
    assert bool(torch.isfinite(llm.logits(IDS)).all())
