"""Step-3.5 in GGUF: published config.json, drafts, quantized experts, files that lie.

test_mixtures.py and test_mixtures_in_llama_cpp.py compare files with transformers and llama.cpp.
"""

import pytest
import torch
import transformers
from safetensors.torch import save_file

from calibrate.gguf_file import quantize_to_gguf
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.gguf.container import read_gguf
from formats.gguf.writing.export import export_gguf
from qserve.llm import LLM
from tests.conftest import make_tiny
from tests.formats.gguf.first_tokens import first_token, write_tokenizer
from tests.formats.gguf.rewritten import rewrite
from tests.qserve.model.test_step import as_published, with_mtp_layers
from tests.qserve.model.test_text_part import WHOLE
from tests.qserve.model.variants import edited
from tests.tiny_families import TINY_FAMILIES

IDS = list(range(5, 45))
DIVISORS, GATES = "rope_freqs.weight", "blk.1.attn_gate.weight"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Folders of GGUF files are made below this home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def make(folder, **different):
    config_class, usual = TINY_FAMILIES["step"]
    return make_tiny(folder, config_class, {**usual, **different})


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make(tmp_path_factory.mktemp("step") / "source")


@pytest.fixture(scope="module")
def file(source):
    path = source.with_name("model.gguf")
    export_gguf(source, path)
    return path


def logits(model):
    return LLM(str(model), device="cpu", dtype="float32", max_model_len=64).logits(IDS)


def stored(path):
    """Every tensor of a float file: type, shape and bytes."""
    data, tensors = path.read_bytes(), read_gguf(path).tensors
    return {
        name: (each.type.name, each.shape, data[each.offset : each.offset + each.num_bytes])
        for name, each in tensors.items()
    }


def test_file_has_llama_cpp_names_and_keys(file, source):
    gguf, want = read_gguf(file), CheckpointReader(source)
    expected = {
        **{"attention.head_count": [4, 8, 8, 4], "attention.head_count_kv": 2},
        **{"attention.sliding_window": 9, "rope.dimension_count": 32},
        "attention.sliding_window_pattern": [False, True, True, False],
        **{"rope.dimension_count_swa": 32, "rope.freq_base": 100.0, "rope.freq_base_swa": 10000.0},
        **{"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32},
        **{"expert_shared_feed_forward_length": 64, "expert_gating_func": 2},
        **{"expert_weights_norm": True, "leading_dense_block_count": 1},
    }
    found = {key: gguf.metadata[f"step35.{key}"] for key in expected}
    assert {k: v if isinstance(v, int | float) else list(v) for k, v in found.items()} == expected
    limits = list(gguf.metadata["step35.swiglu_clamp_exp"])
    assert limits == pytest.approx([0.0, 0.0, 0.2, 0.3])
    limits = list(gguf.metadata["step35.swiglu_clamp_shexp"])
    assert limits == pytest.approx([0.4, 0.0, 0.0, 0.25])
    shapes = {
        **{"blk.1.ffn_gate_exps.weight": (6, 32, 64), "blk.1.ffn_down_exps.weight": (6, 64, 32)},
        **{"blk.1.exp_probs_b.bias": (6,), GATES: (8, 64), "blk.0.attn_gate.weight": (4, 64)},
        **{"blk.1.ffn_up_shexp.weight": (64, 64), DIVISORS: (16,)},
    }
    assert {name: gguf.tensors[name].shape for name in shapes} == shapes
    divisors = torch.frombuffer(bytearray(stored(file)[DIVISORS][2]), dtype=torch.float32)
    assert torch.equal(divisors[8:], torch.ones(8))  # half of a head rotates there
    assert divisors[:8].max() == 4.0
    norm = "blk.1.attn_q_norm.weight"
    one_more = torch.frombuffer(bytearray(stored(file)[norm][2]), dtype=torch.float32)
    ours = want.get("model.layers.1.self_attn.q_norm.weight").float()
    assert torch.equal(one_more, ours + 1)


def test_published_config_json_writes_the_same_file(file, source, tmp_path):
    """It lists rotations by layer, and MTP layers with the others, which are left out."""
    published = edited(source, tmp_path / "published", with_mtp_layers, as_published)
    path = tmp_path / "model.gguf"
    export_gguf(published, path)
    found, want = read_gguf(path).metadata, read_gguf(file).metadata
    assert found.keys() == want.keys()
    for key, value in want.items():
        is_one = isinstance(value, str | int | float)
        assert found[key] == value if is_one else list(found[key]) == list(value), key
    assert stored(path) == stored(file)


def test_step_3_7_text_model_is_written(tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        WHOLE["step-3.7"](), dtype=torch.float32
    ).eval()
    model.save_pretrained(tmp_path / "whole")
    path = tmp_path / "model.gguf"
    export_gguf(tmp_path / "whole", path)
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0]
    found = logits(path)
    assert float((found - want).norm() / want.norm()) < 1e-5


def test_mtp_layers_are_not_read(file, source, tmp_path):
    """Files of llama.cpp's converter have them, lists go on for them, and some keys are missing."""
    more = {
        **{"block_count": 6, "nextn_predict_layers": 2},
        "attention.head_count": [4, 8, 8, 4, 8, 8],
        "attention.head_count_kv": [2] * 6,
        "attention.sliding_window_pattern": [False, True, True, False, True, True],
        "swiglu_clamp_exp": [0.0, 0.0, 0.2, 0.3, 0.0, 0.0],
        "swiglu_clamp_shexp": [0.4, 0.0, 0.0, 0.25, 0.0, 0.0],
        # heads of their width rotate, in layers without a window half of it
        **{"rope.dimension_count": None, "rope.dimension_count_swa": None},
    }

    def with_drafts(tensors):
        tensors["blk.4.nextn.eh_proj.weight"] = torch.ones(64, 128)
        tensors["blk.5.attn_q.weight"] = torch.ones(256, 64)

    metadata = {f"step35.{key}": value for key, value in more.items()}
    path = rewrite(file, tmp_path / "drafts.gguf", metadata, with_drafts)
    assert torch.equal(logits(path), logits(file))


def test_logits_equal_llama_cpp(tmp_path):
    """With the embedding as its head, which files hold twice."""
    pytest.importorskip("xllamacpp", reason="llama.cpp: xllamacpp is not installed")
    source, path = make(tmp_path / "source", tie_word_embeddings=True), tmp_path / "model.gguf"
    write_tokenizer(source)
    export_gguf(source, path)
    theirs = first_token(path, exact=True)
    ours = torch.log_softmax(logits(path)[-1].float(), -1)
    assert max(theirs, key=theirs.get) == int(ours.argmax())
    assert max(abs(value - float(ours[token])) for token, value in theirs.items()) < 1e-3


# metadata that a file states otherwise -> other logits
OTHERS = {
    "swiglu_clamp_exp": [0.0, 0.0, 0.0, 0.3],
    "swiglu_clamp_shexp": [0.0, 0.0, 0.0, 0.25],
    "attention.sliding_window": 4,
    "rope.freq_base": 10000.0,
    "rope.freq_base_swa": 100.0,
    "rope.dimension_count_swa": 16,
    "expert_weights_scale": 1.0,
    "expert_used_count": 3,
}


@pytest.mark.parametrize("key", OTHERS)
def test_changed_metadata_changes_logits(file, tmp_path, key):
    def without_divisors(tensors):
        if key.startswith("rope."):  # they fit one rotation
            del tensors[DIVISORS]

    want = rewrite(file, tmp_path / "same.gguf", change=without_divisors)
    path = rewrite(file, tmp_path / "other.gguf", {f"step35.{key}": OTHERS[key]}, without_divisors)
    found, right = logits(path), logits(want)
    assert float((found - right).norm() / right.norm()) > 1e-3


def shorter(tensors):
    tensors[DIVISORS] = tensors[DIVISORS][:8]


def of_no_rule(tensors):
    tensors[DIVISORS][:8] = torch.arange(1.0, 9.0)


def of_other_heads(tensors):
    tensors[GATES] = tensors[GATES][:4]


LIES = {
    "heads": ({"attention.head_count": [4, 8, 4, 4]}, None, "one number in all layers of a kind"),
    "few heads": ({"attention.head_count": [4, 8]}, None, "expected 4 values, found 2"),
    "no heads": ({"attention.head_count": [4, 0, 0, 4]}, None, "one number in all layers of a"),
    "all heads": ({"attention.head_count": 4}, None, r"(weight|g_proj).*: expected"),
    "kv heads": ({"attention.head_count_kv": [2, 4, 4, 2]}, None, "one number in all layers"),
    "no kv heads": ({"attention.head_count_kv": 0}, None, "one number in all layers"),
    "no pattern": ({"attention.sliding_window_pattern": None}, None, "sliding_window_pattern"),
    "limits": ({"swiglu_clamp_exp": [0.0, 0.3]}, None, "expected 4 numbers from 0 on"),
    "negative": ({"swiglu_clamp_shexp": -1.0}, None, "expected 4 numbers from 0 on"),
    "no number": ({"swiglu_clamp_exp": "x"}, None, "swiglu_clamp_exp: expected numbers"),
    "nan": ({"swiglu_clamp_exp": [0.0, float("nan"), 1.0, 1.0]}, None, "expected numbers"),
    "rotation": ({"rope.dimension_count": 80}, None, "rope.dimension_count: expected RoPE on"),
    "odd": ({"rope.dimension_count": 30}, None, "expected RoPE on 2 to 32 .* found 15"),
    "wide": ({"rope.dimension_count_swa": 34}, None, "dimension_count_swa: expected RoPE on"),
    "scaling": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        None,
        "'yarn' with factor 4.0 is not supported",
    ),
    "softmax": ({"expert_gating_func": 1}, None, "expert_gating_func: expected 2, found 1"),
    "weights as they come": ({"expert_weights_norm": False}, None, "expected True, found False"),
    "few divisors": (None, shorter, r"rope_freqs.weight: expected F32 \[16\]"),
    "divisors": (None, of_no_rule, "expected divisors by Llama 3's rule"),
    "gates": (None, of_other_heads, r"g_proj.weight: expected \[8, 64\]"),
}


@pytest.mark.parametrize(("metadata", "change", "words"), LIES.values(), ids=LIES)
def test_inconsistent_file_raises_one_line_error(file, tmp_path, metadata, change, words):
    stated = {f"step35.{key}": value for key, value in (metadata or {}).items()}
    path = rewrite(file, tmp_path / "bad.gguf", stated, change or (lambda tensors: None))
    with pytest.raises(InputError, match=words) as caught:
        LLM(str(path), device="cpu", max_model_len=64)
    assert "\n" not in str(caught.value) and ".cache" not in str(caught.value)


def ropes(full=(), sliding=()):
    usual = {"rope_type": "default", "rope_theta": 100.0}
    kinds = {"full_attention": full, "sliding_attention": sliding}
    return {kind: {**usual, **dict(each)} for kind, each in kinds.items()}


LINEAR = {"rope_type": "linear", "factor": 2.0}


def test_published_llama3_rope_parameters_round_trip(tmp_path):
    rope = {
        **{"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072},
        **{"low_freq_factor": 1.0, "high_freq_factor": 32.0},
        **{"rope_theta": 5e6, "partial_rotary_factor": 0.5},
    }
    path = tmp_path / "model.gguf"
    export_gguf(make(tmp_path / "source", rope_parameters=ropes(rope)), path)
    found = CheckpointReader(path).config["rope_parameters"]
    assert found["full_attention"] == rope
    assert found["sliding_attention"]["rope_theta"] == 100.0


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({"layer_types": ["full_attention"] * 4}, "expected layers with a window, as in llama.cpp"),
        ({"rope_parameters": ropes(LINEAR)}, "default or llama3 in layers without a window"),
        ({"rope_parameters": ropes((), LINEAR)}, "rope_type default in layers with a window"),
        ({"attention_bias": True}, "attention_bias: is True, but step3p5 in GGUF has False"),
    ],
)
def test_model_unsupported_by_llama_cpp_is_refused(tmp_path, different, words):
    path = tmp_path / "model.gguf"
    with pytest.raises(InputError, match=words):
        export_gguf(make(tmp_path / "source", **different), path)
    assert not path.exists()


@pytest.mark.parametrize("scheme", ["q4_0", pytest.param("q8_0", marks=pytest.mark.exhaustive)])
def test_quantized_experts_run_packed(source, tmp_path, scheme):
    path = tmp_path / "model.gguf"
    quantize_to_gguf(source, path, scheme=scheme, recipe="rtn", quality_windows=0, progress=False)
    kinds = {each.type.name for name, each in read_gguf(path).tensors.items() if "_exps." in name}
    assert kinds == {scheme.upper()}
    reader = CheckpointReader(path)
    assert f"{scheme} run packed" in reader.gguf_summary.lower()
    assert "model.layers.1.moe.experts.5.up_proj.weight_packed" in reader.entries
    weights = CheckpointReader(path, as_floats=True)
    save_file(
        {name: weights.get(name).contiguous() for name in weights.entries},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    found, want = logits(path), logits(tmp_path)
    assert float((found - want).norm() / want.norm()) < 1e-3
