"""Gemma 4 with experts in GGUF: one stack of gate and up, scales of experts, files that lie."""

import pytest
import torch
from safetensors.torch import save_file

from calibrate.gguf_file import quantize_to_gguf
from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.convert import convert_checkpoint
from formats.errors import InputError
from formats.gguf.container import read_gguf
from formats.gguf.writing.export import export_gguf
from formats.scheme import Scheme
from qserve.llm import LLM
from tests.conftest import make_tiny
from tests.formats.gguf.rewritten import rewrite
from tests.tiny_families import TINY_FAMILIES

IDS = list(range(5, 45))
COUNT, USED, WIDTH = (
    f"gemma4.expert_{key}" for key in ("count", "used_count", "feed_forward_length")
)
GATE_UP, DOWN = (f"blk.0.ffn_{name}_exps.weight" for name in ("gate_up", "down"))
ROUTER, INPUT_SCALE = (f"blk.0.ffn_gate_inp.{leaf}" for leaf in ("weight", "scale"))
EXPERT_SCALE, NORM = "blk.0.ffn_down_exps.scale", "blk.0.pre_ffw_norm_2.weight"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Folders of GGUF files are made below this home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def make(folder, **different):
    config_class, usual = TINY_FAMILIES["gemma4_moe"]
    return make_tiny(folder, config_class, {**usual, **different})


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make(tmp_path_factory.mktemp("gemma4") / "source")


@pytest.fixture(scope="module")
def file(source):
    path = source.with_name("model.gguf")
    export_gguf(source, path)
    return path


def logits(model):
    return LLM(str(model), device="cpu", dtype="float32", max_model_len=64).logits(IDS)


def is_same(file, source):
    found, want = CheckpointReader(file), CheckpointReader(source)
    assert found.entries.keys() == want.entries.keys()
    assert all(torch.equal(found.get(name), want.get(name)) for name in want.entries)


def test_file_has_llama_cpp_names_and_sizes(file, source):
    gguf, want = read_gguf(file), CheckpointReader(source)
    assert [gguf.metadata[key] for key in (COUNT, USED, WIDTH)] == [6, 2, 32]
    shapes = {
        **{GATE_UP: (6, 64, 64), DOWN: (6, 64, 32), ROUTER: (6, 64), INPUT_SCALE: (64,)},
        **{EXPERT_SCALE: (6,), NORM: (64,), "blk.0.post_ffw_norm_1.weight": (64,)},
    }
    assert {name: gguf.tensors[name].shape for name in shapes} == shapes
    stored = gguf.tensors[GATE_UP]  # of each expert gate first, then up
    data = file.read_bytes()[stored.offset : stored.offset + stored.num_bytes]
    stack = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(stored.shape)
    for number in range(6):
        for at, name in ((0, "gate_proj"), (32, "up_proj")):
            weight = want.get(f"model.layers.0.experts.{number}.{name}.weight").float()
            assert torch.equal(stack[number, at : at + 32], weight)


def test_separate_gate_and_up_are_read(file, source, tmp_path):
    """llama.cpp's form where the two have different types."""

    def divide(tensors):
        for name in [name for name in tensors if "gate_up" in name]:
            both = tensors.pop(name)
            for half, part in zip(both.chunk(2, 1), ("gate", "up"), strict=True):
                tensors[name.replace("gate_up", part)] = half.contiguous()

    is_same(rewrite(file, tmp_path / "apart.gguf", change=divide), source)


@pytest.mark.exhaustive
def test_gate_and_up_of_different_types_are_written_separately(source, tmp_path):
    """And served from floats: kernels run both as one matrix."""
    path = tmp_path / "model.gguf"
    quantize_to_gguf(
        source,
        path,
        scheme="q4_0",
        overrides=[("re:.*experts.*up_proj", Scheme.parse("w8a16-sym-g32"))],
        recipe="rtn",
        quality_windows=0,
        progress=False,
    )
    kinds = {name: each.type.name for name, each in read_gguf(path).tensors.items()}
    assert GATE_UP not in kinds
    assert kinds["blk.0.ffn_gate_exps.weight"] == "Q4_0"
    assert kinds["blk.0.ffn_up_exps.weight"] == "Q8_0"
    weights = CheckpointReader(path, as_floats=True)
    save_file(
        {name: weights.get(name).contiguous() for name in weights.entries},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    found, want = logits(path), logits(tmp_path)
    assert float((found - want).norm() / want.norm()) < 1e-3


def test_expert_codes_are_unchanged(source, tmp_path):
    """Folder -> Q4_0 -> GPTQ: the same codes, which run packed."""
    folder, path = tmp_path / "w4", tmp_path / "model.gguf"
    quantize_checkpoint(
        source,
        folder,
        scheme=Scheme.parse("w4a16-sym-g32"),
        recipe="rtn",
        output_format="compressed-tensors",
        quality_windows=0,
        progress=False,
    )
    export_gguf(folder, path)
    assert read_gguf(path).tensors[GATE_UP].type.name == "Q4_0"
    reader = CheckpointReader(path)
    assert "q4_0 run packed" in reader.gguf_summary.lower()
    assert "model.layers.0.experts.5.up_proj.weight_packed" in reader.entries
    found = logits(path)
    assert torch.equal(found, logits(folder))
    convert_checkpoint(path, tmp_path / "gptq", "gptq")
    assert torch.equal(logits(tmp_path / "gptq"), found)


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("q4_0", "q4_0 run packed"),
        pytest.param("q8_0", "q8_0 run packed", marks=pytest.mark.exhaustive),
        pytest.param("q4_k_m", "q4_k run packed", marks=pytest.mark.exhaustive),
    ],
)
def test_quantized_logits_equal_dequantized(tmp_path, scheme, words):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
    source, path = make(tmp_path / "source", **sizes), tmp_path / "model.gguf"
    quantize_to_gguf(source, path, scheme=scheme, recipe="rtn", quality_windows=0, progress=False)
    assert words in CheckpointReader(path).gguf_summary.lower()
    weights = CheckpointReader(path, as_floats=True)
    for shard in source.glob("*.safetensors"):
        shard.unlink()
    save_file(
        {name: weights.get(name).contiguous() for name in weights.entries},
        source / "model.safetensors",
    )
    found, want = logits(path), logits(source)
    assert float((found - want).norm() / want.norm()) < 1e-3


def without(name):
    return lambda tensors: tensors.pop(name)


def changed(name, change):
    def edit(tensors):
        tensors[name] = change(tensors[name]).contiguous()

    return edit


def shorter(name):
    return changed(name, lambda tensor: tensor[:-1])


def longer(name):
    return changed(name, lambda tensor: torch.cat([tensor, tensor[:1]]))


def with_more(name, *shape):
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def without_stacks(tensors):
    for name in [name for name in tensors if name.endswith("exps.weight")]:
        del tensors[name]


LIES = {
    # metadata
    "no experts": ({COUNT: 0}, None, "ffn_gate_inp"),
    "experts not stated": ({COUNT: None}, None, "ffn_gate_inp"),
    "fewer experts": ({COUNT: 5}, None, "ffn_gate_up_exps.weight: expected matrices of 5 experts"),
    "more experts": ({COUNT: 7}, None, "ffn_gate_up_exps.weight: expected matrices of 7 experts"),
    "many experts": ({COUNT: 2**31 - 1}, None, "expert_count: expected 1 to 32768"),
    "more experts than numbers": ({COUNT: 2**32 - 1}, None, "expert_count: expected a positive"),
    "many experts without stacks": (
        {COUNT: 2**31 - 1},
        without_stacks,
        "expert_count: expected 1 to 32768",
    ),
    "count is a text": ({COUNT: "6"}, None, "expert_count: expected"),
    "count is a float": ({COUNT: 6.0}, None, "expert_count: expected"),
    "count is true": ({COUNT: True}, None, "expert_count: expected"),
    "counts by layer": ({COUNT: [6, 5, 6]}, None, "expert_count: expected"),
    "no active experts": ({USED: 0}, None, "expert_used_count: expected"),
    "active experts not stated": ({USED: None}, None, "expert_used_count: expected"),
    "more active experts": ({USED: 7}, None, "expert_used_count: expected 1 to 6, found 7"),
    "active experts by layer": ({USED: [2, 2, 1]}, None, "expert_used_count: expected"),
    "no width": ({WIDTH: 0}, None, "expert_feed_forward_length: expected"),
    "width not stated": ({WIDTH: None}, None, "expert_feed_forward_length: expected"),
    "half the width": ({WIDTH: 16}, None, r"gate_proj.weight: expected \[16, 64\]"),
    "great width": ({WIDTH: 2**31 - 1}, None, r"gate_proj.weight: expected \[2147483647, 64\]"),
    # scales
    **{
        f"{what} {name}": (None, change(name), words)
        for name, words in (
            (INPUT_SCALE, r"router.scale: expected \[64\]"),
            (EXPERT_SCALE, r"router.per_expert_scale: expected \[6\]"),
            (NORM, r"pre_feedforward_layernorm_2.weight: expected \[64\]"),
            (ROUTER, r"router.proj.weight: expected \[6, 64\]"),
            (GATE_UP, "ffn_gate_up_exps.weight: expected matrices of 6 experts"),
            (DOWN, "ffn_down_exps.weight: expected matrices of 6 experts"),
        )
        for what, change in (("shorter", shorter), ("longer", longer))
    },
    **{
        f"without {name}": (None, without(name), words)
        for name, words in (
            (INPUT_SCALE, "router.scale: is missing"),
            (EXPERT_SCALE, "router.per_expert_scale: is missing"),
            (NORM, "pre_feedforward_layernorm_2.weight: is missing"),
            (ROUTER, "router.proj.weight: is missing"),
            (GATE_UP, "experts.0.gate_proj.weight: is missing"),
            (DOWN, "experts.0.down_proj.weight: is missing"),
        )
    },
    # stacks
    "odd rows": (None, changed(GATE_UP, lambda x: x[:, :-1]), "expected matrices of 6 experts"),
    "fewer rows": (None, changed(GATE_UP, lambda x: x[:, :-2]), r"expected \[32, 64\]"),
    "fewer inputs": (None, changed(DOWN, lambda x: x[..., :-2]), r"expected \[64, 32\]"),
    "no stack": (None, changed(GATE_UP, lambda x: x.reshape(1, -1)), "ffn_gate_up_exps.weight"),
    "gate again": (
        None,
        with_more("blk.0.ffn_gate_exps.weight", 6, 32, 64),
        "second tensor.*gate_proj",
    ),
    "bias": (None, with_more("blk.0.ffn_gate_up_exps.bias", 6, 64), "is not known"),
    "scale of gate and up": (None, with_more("blk.0.ffn_gate_up_exps.scale", 6), "is not known"),
    "scale of a linear": (None, with_more("blk.0.attn_q.scale", 1), "is not known"),
    "inputs of layers": ({"gemma4.embedding_length_per_layer_input": 32}, None, "is missing"),
}


@pytest.mark.parametrize(("metadata", "change", "words"), LIES.values(), ids=LIES)
def test_inconsistent_expert_metadata_raises_one_line_error(
    file, tmp_path, metadata, change, words
):
    path = rewrite(file, tmp_path / "bad.gguf", metadata, change or (lambda tensors: None))
    with pytest.raises(InputError, match=words) as caught:
        LLM(str(path), device="cpu", max_model_len=64)
    assert "\n" not in str(caught.value) and ".cache" not in str(caught.value)


def test_dense_model_with_expert_count_is_read(source, tmp_path):
    """enable_moe_block decides, not num_experts."""
    different = {"enable_moe_block": False}
    dense, path = make(tmp_path / "dense", **different), tmp_path / "model.gguf"
    assert CheckpointReader(dense).config["num_experts"] == 6
    export_gguf(dense, path)
    assert COUNT not in read_gguf(path).metadata
    is_same(path, dense)
