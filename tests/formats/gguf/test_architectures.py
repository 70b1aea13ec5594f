"""Architectures of GGUF files: written, read back and computed as transformers computes the source.

Files in the form of llama.cpp's converter, where it differs from what is written here.
"""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from calibrate.gguf_file import quantize_to_gguf
from formats.architecture.rows.own_code import OWN_CODE_DENSE, OWN_CODE_MIXTURES
from formats.architecture.stored_form.config import canonical_config
from formats.checkpoint import CheckpointReader
from formats.convert import convert_checkpoint
from formats.errors import InputError
from formats.families import FAMILIES
from formats.gguf.architectures.table import ARCHITECTURES
from formats.gguf.container import read_gguf
from formats.gguf.row_orders import to_family, to_gguf
from formats.gguf.writing.export import export_gguf, family_of
from formats.gguf.writing.metadata import metadata_of
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from qserve.llm import LLM
from tests.conftest import make_tiny
from tests.formats.gguf.cases import CASES, GEMMA_3N, MORE_CASES
from tests.formats.gguf.mixture_cases import MINICPM
from tests.formats.gguf.written import F32, write_gguf
from tests.tiny_families import TINY, TINY_FAMILIES

IDS = list(range(5, 45))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Folders of GGUF files are made below this home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def written(tmp_path):
    """written(family, what differs) -> (source, its GGUF file)."""

    def make(family, different):
        config_class, usual = TINY_FAMILIES[family]
        source = make_tiny(tmp_path / "source", config_class, {**usual, **different})
        export_gguf(source, tmp_path / "model.gguf")
        return source, tmp_path / "model.gguf"

    return make


def logits(model):
    return LLM(str(model), device="cpu", dtype="float32", max_model_len=64).logits(IDS)


def check(case, written, transformers_model):
    family, different, architecture = case
    source, file = written(family, different)
    assert read_gguf(file).metadata["general.architecture"] == architecture
    assert not [each for each in inspect_checkpoint(file).problems if each.severity == "error"]
    found, want = CheckpointReader(file), CheckpointReader(source)
    unread = FAMILIES[want.config["architectures"][0]].unread(want.config)
    named = {name for name in want.entries if not name.startswith(unread)}
    own_head = {"lm_head.weight"} if want.config["tie_word_embeddings"] else set()
    extra = {name for name in found.entries.keys() - named if not name.startswith(unread)}
    assert not named - found.entries.keys() and extra <= own_head
    as_other = found.config["architectures"] != want.config["architectures"]
    for name in named:
        # 1 is added to the norms of some families, and subtracted again; a family that is written
        # as another one has the other's order of rows
        if not (as_other and "_proj" in name):
            assert torch.allclose(found.get(name).float(), want.get(name), atol=1e-6, rtol=0), name
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        expected = model.eval()(torch.tensor([IDS])).logits[0]
        # config.json made from the file means the same to transformers
        again = transformers_model(file)(torch.tensor([IDS])).logits[0]
    computed = logits(file)
    assert torch.allclose(again, expected, atol=1e-4, rtol=0)
    assert torch.allclose(computed, expected, atol=1e-3, rtol=0)
    assert torch.equal(computed.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits_equal_transformers_on_source(case, written, transformers_model):
    check(case, written, transformers_model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE_CASES.values(), ids=MORE_CASES)
def test_other_architecture_logits_equal_source(case, written, transformers_model):
    check(case, written, transformers_model)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_qkv_rows_are_in_llama_cpp_order(heads, kv_heads):
    """Its converter takes them from each KV head in turn."""
    rows = torch.arange(4 * (heads + 2 * kv_heads) * 8).reshape(-1, 8)
    by_head = rows.view(kv_heads, heads // kv_heads + 2, 4, 8)
    parts = [by_head[:, :-2], by_head[:, [-2]], by_head[:, [-1]]]
    stored = to_gguf(rows, heads, kv_heads)
    assert torch.equal(stored, torch.cat([part.reshape(-1, 8) for part in parts]))
    assert torch.equal(to_family(stored, heads, kv_heads), rows)


def test_row_order_equals_readme_golden_value():
    assert to_gguf(torch.arange(8)[:, None], 4, 2).flatten().tolist() == [0, 1, 4, 5, 2, 6, 3, 7]


def rewritten(file, target, *, metadata=None, tensors=None):
    """The file with other metadata (None: without the key) and other tensors."""
    gguf = read_gguf(file)
    found = {name: stored(each) for name, each in gguf.tensors.items()}
    found = tensors(found) if tensors else found
    values = {**gguf.metadata, **(metadata or {})}
    values = {key: value for key, value in values.items() if value is not None}
    return write_gguf(target, values, {name: (each, F32) for name, each in found.items()})


def stored(tensor):
    data = bytearray(tensor.file.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes])
    return torch.frombuffer(data, dtype=torch.float32).reshape(tensor.shape)


def with_fused_qkv(tensors):
    """ChatGLM's and Phi-2's files of before, and llama.cpp's option to fuse."""
    found = {}
    for name, tensor in tensors.items():
        if ".attn_q." in name:
            parts = [tensors[name.replace("attn_q.", f"attn_{x}.")] for x in "qkv"]
            found[name.replace("attn_q.", "attn_qkv.")] = torch.cat(parts)
        elif ".attn_k." not in name and ".attn_v." not in name:
            found[name] = tensor
    return found


@pytest.mark.parametrize("family", ["phi", "glm", "llama"])
def test_fused_qkv_is_split(family, written, tmp_path):
    """Rotated pairs (Llama), biases and fewer KV heads (GLM, Llama) included."""
    different = MORE_CASES["glm"][1] if family == "glm" else {}
    source, file = written(family, different)
    fused = rewritten(file, tmp_path / "fused.gguf", tensors=with_fused_qkv)
    assert not [name for name in read_gguf(fused).tensors if ".attn_q." in name]
    found, want = CheckpointReader(fused), CheckpointReader(source)
    assert found.entries.keys() == want.entries.keys()
    for name in want.entries:
        assert torch.equal(found.get(name).float(), want.get(name)), name
    assert torch.equal(logits(fused), logits(source))


def test_minicpm3_from_llama_cpp_converter(written, tmp_path):
    """It does not state the width of values, which is then that of a head of the hidden size."""
    source, file = written("minicpm3", {**MINICPM, "v_head_dim": 16})
    left_out = ("vocab_size", "attention.value_length", "rope.freq_base")
    metadata = {f"minicpm3.{key}": None for key in left_out}
    found = rewritten(file, tmp_path / "minimal.gguf", metadata=metadata)
    assert torch.equal(logits(found), logits(source))


def test_minimal_falcon_from_llama_cpp_converter(written, tmp_path):
    """It states neither widths nor theta, and a layout of its own name."""
    source, file = written("falcon", {})
    left_out = ("vocab_size", "attention.key_length", "attention.value_length", "rope.freq_base")
    metadata = {f"falcon.{key}": None for key in (*left_out, "rope.dimension_count")}
    metadata["falcon.tensor_data_layout"] = "jploski"
    found = rewritten(file, tmp_path / "minimal.gguf", metadata=metadata)
    assert torch.equal(logits(found), logits(source))


def test_exaone_rows_are_not_permuted(written, tmp_path):
    """A Qwen3 without norms of heads is one."""
    source, file = written("qwen3", {})
    before = read_gguf(file).metadata
    metadata = {key: None for key in before if key.startswith("qwen3.")}
    metadata |= {key.replace("qwen3.", "exaone."): before[key] for key in metadata}

    def without_norms(tensors):
        return {name: x for name, x in tensors.items() if not re.search(r"attn_[qk]_norm", name)}

    metadata["general.architecture"] = "exaone"
    target = tmp_path / "exaone.gguf"
    found = CheckpointReader(rewritten(file, target, metadata=metadata, tensors=without_norms))
    want = CheckpointReader(source)
    assert found.config["architectures"] == ["LlamaForCausalLM"]
    assert "model.layers.0.self_attn.q_proj.weight" in found.entries
    for name in found.entries:
        assert torch.equal(found.get(name).float(), want.get(name)), name


def test_quantized_gpt2_runs_packed_and_converts_to_gptq(tmp_path):
    """Its checkpoint stores matrices as [inputs, outputs], its file as [outputs, inputs]."""
    config_class, usual = TINY_FAMILIES["gpt2"]
    source = make_tiny(tmp_path / "source", config_class, usual)
    file = tmp_path / "model.gguf"
    settings = {"recipe": "rtn", "quality_windows": 0, "progress": False}
    quantize_to_gguf(source, file, scheme=Scheme.parse("w8a16-sym-g32"), **settings)
    assert "12 Q8_0 run packed" in CheckpointReader(file).gguf_summary
    found, want = logits(file), logits(source)
    assert 0 < float((found - want).norm() / want.norm()) < 0.03
    convert_checkpoint(file, tmp_path / "gptq", "gptq")
    assert torch.allclose(logits(tmp_path / "gptq"), found, atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", ["llama", "bloom", "phi"])
def test_partial_head_rows_are_refused(family, written, tmp_path):
    _, file = written(family, {})

    def with_a_row_more(tensors):
        tensors = with_fused_qkv(tensors) if family == "phi" else tensors
        name = f"blk.0.attn_{'q' if family == 'llama' else 'qkv'}.weight"
        more = torch.cat([tensors[name], tensors[name][:1]])
        return {**tensors, name: more}

    changed = rewritten(file, tmp_path / "changed.gguf", tensors=with_a_row_more)
    with pytest.raises(InputError, match="expected rows of 4 heads and"):
        CheckpointReader(changed)


def test_mistral_small_3_does_not_scale_frequencies(written, tmp_path):
    """It has the architecture of Ministral 3, whose class in transformers has YaRN as default."""
    source, file = written("mistral", {"sliding_window": None})
    before = read_gguf(file).metadata
    metadata = {key: None for key in before if key.startswith("llama.")}
    metadata |= {key.replace("llama.", "mistral3."): before[key] for key in metadata}
    metadata["general.architecture"] = "mistral3"
    found = rewritten(file, tmp_path / "small.gguf", metadata=metadata)
    assert torch.equal(logits(found), logits(source))


@pytest.mark.parametrize(
    ("family", "metadata", "words"),
    [
        ("mpt", {"mpt.attention.clamp_kqv": 6.0}, "clamp_kqv: expected None, found 6.0"),
        ("mpt", {"mpt.attention.max_alibi_bias": 0.0}, "max_alibi_bias: expected 8.0, found 0.0"),
        ("olmo", {"olmo.attention.clamp_kqv": 8.0}, "clamp_kqv"),
        ("stablelm", {"stablelm.use_parallel_residual": True}, "use_parallel_residual"),
        ("apertus", {"xielu.alpha_n": [1, 2]}, "xielu.alpha_n: expected a number for each of 3"),
    ],
)
def test_unsupported_variant_is_refused_by_key(family, metadata, words, written, tmp_path):
    _, file = written(family, {})
    changed = rewritten(file, tmp_path / "changed.gguf", metadata=metadata)
    with pytest.raises(InputError, match=words):
        CheckpointReader(changed)


def test_unsupported_variant_is_refused_by_tensor(written, tmp_path):
    """StableLM's norms of heads, MPT's learned positions."""
    _, file = written("stablelm", {})

    def with_norms(tensors):
        return {**tensors, "blk.0.attn_q_norm.weight": torch.ones(4, 16)}

    changed = rewritten(file, tmp_path / "changed.gguf", tensors=with_norms)
    with pytest.raises(InputError, match=r"attn_q_norm.weight: is not known as a tensor of stable"):
        CheckpointReader(changed)


@pytest.mark.parametrize(
    ("family", "different", "words"),
    [
        # families that llama.cpp has no architecture for
        ("opt", {}, "OPTForCausalLM: cannot be written as GGUF"),
        ("gptj", {}, "GPTJForCausalLM: cannot be written"),
        ("nanochat", {}, "NanoChatForCausalLM: cannot be written"),
        ("vaultgemma", {}, "VaultGemmaForCausalLM: cannot be written"),
        ("cwm", {}, "CwmForCausalLM: cannot be written"),
        ("hyperclovax", {}, "HyperCLOVAXForCausalLM: cannot be written"),
        ("ministral", {}, "MinistralForCausalLM: cannot be written"),
        # variants that its architectures do not compute
        ("falcon_rw", {}, "bias: is True, but falcon in GGUF has False"),
        ("gpt2", {"activation_function": "relu"}, "gpt2 has 'gelu_new' in GGUF, found 'relu'"),
        ("gpt_neox", {"hidden_act": "relu"}, "gptneox has 'gelu' in GGUF"),
        ("ernie4_5", {"use_bias": True}, "use_bias: is True"),
        ("jais2", {"mlp_bias": False}, "mlp_bias: is False, but jais2 in GGUF has True"),
        ("glm", {"head_dim": 32}, "head_dim: expected 16 in chatglm, found 32"),
        ("ministral3", {"mscale": 0.7}, "mscale: expected 1.0"),
        ("granite_swa", {"layer_rope_theta": [0, 10.0, 20.0]}, "expected one theta in all layers"),
        ("gemma3n", {"laurel_rank": 8}, "laurel_rank: is 8, but gemma3n in GGUF has 64"),
        ("gemma3n", {**GEMMA_3N, "num_kv_shared_layers": 4}, "expected 20 layers with keys"),
        (
            "gemma3n",
            {**GEMMA_3N, "activation_sparsity_pattern": [0.0] * 25},
            "expected 0.95 in the first 10 layers",
        ),
        ("gemma4_shared", {}, "a layer with a window and one without"),
    ],
)
def test_variant_unsupported_by_llama_cpp_is_refused(family, different, words):
    config_class, usual = TINY_FAMILIES[family]
    make = getattr(transformers, config_class)
    known = {key: value for key, value in TINY.items() if hasattr(make(), key)}
    if "mscale" in different:
        different = {"rope_parameters": {**usual["rope_parameters"], **different}}
    config = json.loads(make(**{**known, **usual, **different}).to_json_string(use_diff=False))
    names = [name for name, row in FAMILIES.items() if row.model_type == config["model_type"]]
    config = canonical_config({**config, "architectures": names[:1]})
    with pytest.raises(InputError, match=words):
        metadata_of(config, *family_of(config), "model")


def test_head_unsupported_by_llama_cpp_is_refused(tmp_path):
    source = make_tiny(tmp_path / "source", *TINY_FAMILIES["cohere2"])
    with pytest.raises(InputError, match="lm_head: is a separate output head, which cohere2 does"):
        export_gguf(source, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_readme_lists_gguf_architectures_and_unsupported_families():
    readme = (Path(__file__).parents[3] / "formats" / "README.md").read_text()
    part = readme.split("\n### GGUF\n")[1].split("\n## ")[0]
    assert not [name for name in ARCHITECTURES if f"`{name}`" not in part]
    written = set()
    for row in ARCHITECTURES.values():
        written |= {row.family, row.with_experts, row.with_window, row.with_sigmoid}
        written |= {row.with_shared, row.without_experts, row.with_norms[1], *row.also}
    assert "`rows/own_code.py`" in part  # the families of this file are named there, not here
    named = {row.title for row in (*OWN_CODE_DENSE, *OWN_CODE_MIXTURES)}
    titles = {row.title for name, row in FAMILIES.items() if row.served and name not in written}
    titles.remove(re.search(r"`cohere2moe` \((.+?)\) is neither read nor written", part)[1])
    listed = re.search(r"has no architecture for (.+?)\.\s", part, re.DOTALL)[1].replace(
        " with windows", ""
    )
    assert set(re.split(r",\s+|\s+and\s+", listed)) == titles - named
