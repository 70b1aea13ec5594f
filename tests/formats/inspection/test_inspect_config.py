"""`inspect` of config.json: it refuses what transformers refuses, and reports what servers lack."""

import json
import math

import pytest

from formats.architecture.rope_types import ROPE_TYPES
from formats.families import FAMILIES
from formats.inspection.config import (
    ACTIVATIONS,
    DTYPES,
    REQUIRED,
    check_config,
)
from formats.inspection.findings import Findings
from formats.inspection.inspect import inspect_checkpoint
from tests.qserve.model.variants import edited
from tests.tiny_families import TINY_FAMILIES

CHECKED = [family for family in FAMILIES.values() if family.rules is not None]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture
def inspect_config(gptq_model, write_folder):
    """inspect_config(**changes of config.json) -> the Inspection of an otherwise good folder."""

    def inspect(**changes):
        tensors, config = gptq_model
        return inspect_checkpoint(write_folder(tensors, {**config, **changes}))

    return inspect


REFUSED = [
    ({"hidden_act": "xyz"}, "hidden_act", "'xyz'"),
    ({"hidden_act": None}, "hidden_act", "None"),
    ({"torch_dtype": "float17"}, "torch_dtype", "'float17'"),
    ({"torch_dtype": "torch.bfloat16"}, "torch_dtype", "'torch.bfloat16'"),
    ({"dtype": "float17", "torch_dtype": "float16"}, "dtype", "'float17'"),
    ({"rope_scaling": {"rope_type": "xyz"}}, "rope_scaling.rope_type", "'xyz'"),
    ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_scaling.type", "'su'"),
    ({"rope_parameters": {"rope_type": None}}, "rope_parameters.rope_type", "None"),
    ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type", "['yarn']"),
    ({"rope_scaling": "linear"}, "rope_scaling", "'linear'"),
    ({"rope_parameters": []}, "rope_parameters", "[]"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "it is missing"),
    ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "rope_scaling.factor", "'8'"),
    ({"rope_scaling": {"type": "yarn", "factor": 0}}, "rope_scaling.factor", "found 0"),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [0.0]}},
        "rope_scaling.long_factor",
        "a list of numbers above 0, found [0.0]",
    ),
    ({"rope_theta": None}, "rope_theta", "None"),
    ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_parameters.rope_theta", "'1e4'"),
    ({"model_type": "x"}, "model_type", "'x' is not that of LlamaForCausalLM"),
    ({"model_type": ""}, "model_type", "'' is not that of LlamaForCausalLM"),
    ({"rms_norm_eps": None}, "rms_norm_eps", "None"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps", "nan"),
    ({"max_position_embeddings": 0}, "max_position_embeddings", "found 0"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings", "'false'"),
]


@pytest.mark.parametrize(("changes", "key", "text"), REFUSED)
def test_invalid_config_value_is_one_error_and_no_for_every_server(
    inspect_config, changes, key, text
):
    found = inspect_config(**changes)
    errors = [p for p in found.problems if p.severity == "error"]
    assert [problem.subject for problem in errors] == [f"config.json {key}"]
    assert text in errors[0].text
    assert {verdict.answer for verdict in found.loads_in} == {"no"}
    assert errors[0].subject in found.loads_in[1].reason


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "silu", "torch_dtype": "bfloat16", "rope_scaling": None},
        {"dtype": "float16", "torch_dtype": "float17"},
        {"dtype": None},
        {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
        {"rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": {}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    ],
)
def test_valid_config_values_have_no_problems(inspect_config, changes):
    found = inspect_config(**changes)
    assert found.problems == ()
    assert "no" not in {verdict.answer for verdict in found.loads_in}


def test_activation_only_in_transformers(inspect_config):
    answers = {v.program: v for v in inspect_config(hidden_act="gelu").loads_in}
    assert {name: v.answer for name, v in answers.items()} == {
        "this project": "no",
        "vLLM": "no",
        "SGLang": "no",
        "transformers": "yes",
    }
    assert answers["vLLM"].reason == "computes silu, not gelu"


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_family_specific_config_values(model_type):
    findings = Findings()
    config = {"model_type": model_type, "hidden_act": "xyz", "rope_scaling": {"type": "su"}}
    check_config({**config, "dtype": {"text": "float16"}}, findings)
    assert findings.problems == []
    check_config({**config, "dtype": "float17"}, findings)
    assert [problem.subject for problem in findings.problems] == ["config.json dtype"]


@pytest.mark.parametrize("name", [*REQUIRED, "intermediate_size"])
def test_missing_required_config_key_is_one_error(gptq_model, write_folder, name):
    tensors, config = gptq_model
    del config[name]
    found = inspect_checkpoint(write_folder(tensors, config))
    (problem,) = found.problems
    assert (problem.subject, problem.text) == (f"config.json {name}", "is missing")
    assert {verdict.answer for verdict in found.loads_in} == {"no"}


@pytest.mark.parametrize("kv_heads", [3, 8, 2**31])
def test_kv_heads_not_dividing_heads_are_reported(gptq_model, write_folder, kv_heads):
    tensors, config = gptq_model
    config |= {"num_key_value_heads": kv_heads}
    heads = config["num_attention_heads"]
    texts = [
        str(problem.text) for problem in inspect_checkpoint(write_folder(tensors, config)).problems
    ]
    assert f"expected a divisor of the {heads} attention heads, found {kv_heads}" in texts


@pytest.mark.parametrize(("model_type", "heads"), [("mistral", 8), ("qwen2", 32), ("qwen3", 32)])
def test_default_kv_heads_are_compared_with_tensors(gptq_model, write_folder, model_type, heads):
    tensors, config = gptq_model
    del config["num_key_value_heads"]
    config |= {"model_type": model_type, "architectures": ["X"], "head_dim": 16}
    texts = [p.text for p in inspect_checkpoint(write_folder(tensors, config)).problems]
    assert texts.count(f"config.json states [{16 * heads}, 64], found [32, 64]") == 4


def test_activation_and_rope_tables_equal_transformers():
    activations = pytest.importorskip("transformers.activations")
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    assert set(ACTIVATIONS) == set(activations.ACT2CLS)
    assert set(ROPE_TYPES) == {"default", *rope.ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("kind", list(ROPE_TYPES))
def test_rope_required_keys_equal_transformers(kind):
    """It says so where one is missing, but for factors that it fills in or only warns of."""
    auto = pytest.importorskip("transformers").AutoConfig
    numbers, lists = ROPE_TYPES[kind].numbers, ROPE_TYPES[kind].lists
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    rope = {"rope_type": kind, "rope_theta": 1e4}
    rope |= dict.fromkeys(numbers, 2.0) | dict.fromkeys(lists, [1.0] * 8)
    auto.for_model("llama", **sizes, rope_scaling=dict(rope))
    for name in (*numbers, *lists):
        less = {key: value for key, value in rope.items() if key != name}
        with pytest.raises(KeyError, match=name):
            auto.for_model("llama", **sizes, rope_scaling=less)


@pytest.mark.parametrize("name", ["num_key_value_heads", "head_dim", "hidden_size"])
@pytest.mark.parametrize("family", CHECKED, ids=lambda family: family.model_type)
def test_null_accepted_where_transformers_accepts_it(family, name):
    auto = pytest.importorskip("transformers").AutoConfig
    config = {**dict.fromkeys((*REQUIRED, family.inner_key), 64), name: None}
    findings = Findings()
    check_config({**config, "model_type": family.model_type}, findings)
    try:
        auto.for_model(family.model_type, **config)
    except Exception:  # what a config class raises is not documented
        assert [problem.subject for problem in findings.problems] == [f"config.json {name}"]
    else:
        assert findings.problems == []


@pytest.mark.parametrize("family", CHECKED, ids=lambda family: family.model_type)
def test_defaults_equal_transformers(family):
    auto = pytest.importorskip("transformers").AutoConfig
    sizes = dict.fromkeys(REQUIRED, 64)
    theirs = auto.for_model(family.model_type, **sizes)
    for name, usual in (("num_key_value_heads", 64), ("head_dim", 1)):
        found = getattr(theirs, name, None) or usual
        assert found == family.rules.defaults.get(name, usual), name


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_transformers_knows_the_family_by_its_model_type(family):
    models = pytest.importorskip("transformers.models.auto.modeling_auto")
    names = models.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if family.model_type == "mistral4":  # transformers lists it next to models that see
        names = models.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    theirs = family.architecture
    if family.class_in_transformers:  # layers, without a class that has a head
        layers = getattr(pytest.importorskip("transformers"), family.class_in_transformers)
        assert layers.config_class.model_type == family.model_type
        assert family.model_type not in names
    elif family.defaults_of:
        # Ling 3, which has a class, and Ling 2.6 have one model_type
        assert names.get(family.model_type) != family.architecture
        assert family.defaults_of in names
    else:
        assert names[family.model_type] == theirs
    for stated, wrong in ((family.model_type, []), ("x", ["config.json model_type"])):
        findings = Findings()
        sizes = dict.fromkeys((*REQUIRED, family.inner_key), 64)
        check_config({**sizes, "architectures": [theirs], "model_type": stated}, findings)
        assert [problem.subject for problem in findings.problems] == wrong


def test_dtype_names_exist_in_torch():
    torch = pytest.importorskip("torch")
    assert all(getattr(torch, name).is_floating_point for name in DTYPES)


USUAL = ("qwen3_moe", "deepseek_v2")  # families of these two kinds of shapes by default


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in USUAL else [pytest.mark.exhaustive])
        for family in TINY_FAMILIES
    ],
)
def test_shapes_follow_config_in_every_family(tiny_model, tmp_path, family):
    """Families whose other config rules are not known are checked by their shapes, too."""
    source = tiny_model(family)
    assert not [each for each in inspect_checkpoint(source).problems if each.severity == "error"]
    config = json.loads((source / "config.json").read_text())
    key = next(name for name in ("n_embd", "d_model", "hidden_size") if name in config)
    for name, value in (("other", 2 * config[key]), ("negative", -config[key])):
        folder = edited(source, tmp_path / name, None, lambda c, v=value: c.__setitem__(key, v))
        found = inspect_checkpoint(folder)
        assert not found.ok and found.loads_in[0].answer == "no", name
