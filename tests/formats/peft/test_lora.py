"""PEFT folders: what is read, what each number means, and what is refused by its name."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.errors import CheckpointError
from formats.peft.lora import LoraPair, read_adapter
from formats.peft.lora_config import REFUSED, LoraConfig
from tests.adapters import write_adapter

Q0, DOWN2 = "model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"
SHAPES = {
    f"model.layers.{i}.{name}": shape
    for i in range(3)
    for name, shape in (
        ("self_attn.q_proj", (24, 16)),
        ("self_attn.o_proj", (16, 24)),
        ("mlp.down_proj", (16, 40)),
    )
}


def config(**fields):
    stated = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    return LoraConfig.from_dict({**stated, **fields})


@pytest.mark.parametrize(
    ("fields", "module", "rank", "scale"),
    [
        ({}, Q0, 8, 2.0),
        ({"use_rslora": True}, Q0, 8, 16 / 8**0.5),
        ({"rank_pattern": {"q_proj": 4}}, Q0, 4, 4.0),
        ({"rank_pattern": {"q_proj": 4}}, "model.layers.0.self_attn.eq_proj", 8, 2.0),
        # the first that matches counts, up to the end of the name
        ({"rank_pattern": {r"layers\.2\..*": 2, "down_proj": 4}}, DOWN2, 2, 8.0),
        ({"rank_pattern": {"layers": 2}}, DOWN2, 8, 2.0),
        ({"rank_pattern": {"^model.layers.2.mlp.down_proj": 32}}, DOWN2, 32, 0.5),
        ({"alpha_pattern": {"q_proj|down_proj": 4}, "use_rslora": True}, DOWN2, 8, 2**0.5),
        ({"alpha_pattern": {"mlp.*": 1.5}}, Q0, 8, 2.0),
    ],
)
def test_module_rank_and_scale(fields, module, rank, scale):
    found = config(**fields)
    assert (found.rank_of(module), found.scale_of(module)) == (rank, pytest.approx(scale))


@pytest.mark.parametrize(
    ("fields", "adapted"),
    [
        ({}, {"0.self_attn.q_proj", "1.self_attn.q_proj", "2.self_attn.q_proj"}),
        ({"target_modules": "all-linear"}, {n.removeprefix("model.layers.") for n in SHAPES}),
        (
            {"target_modules": r".*\.[01]\.(self_attn\.o|mlp\.down)_proj"},
            {"0.self_attn.o_proj", "0.mlp.down_proj", "1.self_attn.o_proj", "1.mlp.down_proj"},
        ),
        ({"target_modules": "q_proj"}, set()),  # an expression of whole names
        ({"target_modules": ["proj"]}, set()),
        ({"layers_to_transform": [0, 2]}, {"0.self_attn.q_proj", "2.self_attn.q_proj"}),
        ({"layers_to_transform": 1, "layers_pattern": "layers"}, {"1.self_attn.q_proj"}),
        ({"layers_to_transform": 1, "layers_pattern": ["blocks"]}, set()),
        ({"exclude_modules": ["layers.1.self_attn.q_proj"], "layers_to_transform": [0, 1]},
         {"0.self_attn.q_proj"}),
        ({"exclude_modules": r".*\.[02]\..*"}, {"1.self_attn.q_proj"}),
    ],
)  # fmt: skip
def test_target_modules_select_linears(fields, adapted):
    found = config(**fields)
    assert {n.removeprefix("model.layers.") for n in SHAPES if found.adapts(n)} == adapted


@pytest.mark.exhaustive
def test_module_matching_equals_peft():
    """Names match as in PEFT's own function: every name above, and similar ones."""
    tuners = pytest.importorskip("peft.tuners.tuners_utils")
    from peft import LoraConfig as PeftConfig

    names = [*SHAPES, "lm_head", "model.layers.1.self_attn.eq_proj", "layers.q_proj"]
    for fields in (
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["layers"]},
        {"target_modules": r".*(q|down)_proj"},
        {"target_modules": [Q0, "down_proj"], "exclude_modules": ["mlp.down_proj"]},
    ):
        theirs = PeftConfig(**fields)
        for name in names:
            want = tuners.check_target_module_exists(theirs, name)
            want = bool(want) and not isinstance(want, tuners._ExcludedModule)
            assert config(**fields).adapts(name) == want, (fields, name)


NOT_NEUTRAL = {
    "use_dora": True,
    "modules_to_save": ["score"],
    "bias": "all",
    "lora_bias": True,
    "fan_in_fan_out": True,
    "layer_replication": [[0, 2]],
    "trainable_token_indices": [3],
    "alora_invocation_tokens": [7],
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "megatron_config": {"a": 1},
}


@pytest.mark.parametrize("key", REFUSED)
def test_unsupported_arithmetic_options_are_refused(key):
    with pytest.raises(CheckpointError, match=rf"adapter_config.json {key}: .*not supported"):
        config(**{key: NOT_NEUTRAL[key]})
    config(**{key: None})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"peft_type": "LOHA"}, "peft_type: expected 'LORA', found 'LOHA'"),
        ({"use_new_thing": 3}, "use_new_thing: unknown, found 3"),
        ({"init_lora_weights": "pissa_niter_16"}, "changed the base model's weights"),
        ({"init_lora_weights": "lora_ga"}, "changed the base model's weights"),
        ({"r": 0}, "r: expected 1 to 1024, found 0"),
        ({"r": True}, "r: expected 1 to 1024"),
        ({"lora_alpha": "8"}, "lora_alpha: expected a number"),
        ({"lora_alpha": 1e308}, "lora_alpha: expected a number within float32, found 1e"),
        ({"lora_alpha": 10**400}, "lora_alpha: expected a number within float32, found 401 digits"),
        ({"alpha_pattern": {"q_proj": -1e39}}, "alpha_pattern 'q_proj': expected a number within"),
        ({"r": 10**400}, "r: expected 1 to 1024"),
        ({"alpha_pattern": {f"n{i}": 1 for i in range(4097)}}, "alpha_pattern: expected at most"),
        ({"target_modules": ["q"] * 4097}, "target_modules: expected at most 4096, found 4097"),
        ({"rank_pattern": {f"q{i}.*": 1 for i in range(257)}}, "expected at most 256 expressions"),
        ({"rank_pattern": {"q" * 501: 1}}, "rank_pattern: expected names of at most 500"),
        ({"lora_alpha": float("nan")}, "lora_alpha: expected a number"),
        ({"target_modules": None}, "target_modules: expected names or an expression"),
        ({"target_modules": [3]}, "target_modules: expected names or an expression"),
        ({"rank_pattern": {"q": 0}}, "rank_pattern 'q': expected 1 to 1024"),
        ({"rank_pattern": []}, None),
        ({"use_rslora": "yes"}, "use_rslora: expected true or false"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform: expected numbers"),
        ({"layers_pattern": "(a+)+"}, "layers_pattern: expected the name of a list"),
        ({"init_lora_weights": "gaussian", "eva_config": {"rho": 2}}, None),
    ],
)
def test_invalid_config_fields_are_refused(fields, match):
    if match is None:
        config(**fields)
        return
    with pytest.raises(CheckpointError, match=match):
        config(**fields)


def test_pattern_matching_time_is_bounded():
    with pytest.raises(CheckpointError, match=r"takes long|is not supported|too long|repeats"):
        config(target_modules="(.*a){900}" * 30).adapts("a" * 300)


def test_total_pattern_matching_time_is_bounded():
    found = config(alpha_pattern={f"(.*a|.*b{n})+(c|d)*": 1 for n in range(256)})
    with pytest.raises(CheckpointError, match="patterns take too long to match"):
        for n in range(1000):
            found.scale_of(f"model.layers.{n}.self_attn.q_proj")


def test_full_module_names_skip_pattern_matching():
    """PEFT writes a key for each linear where ranks differ."""
    names = [f"model.layers.{i}.self_attn.{c}_proj" for i in range(126) for c in "qkvo"]
    patterns = {name: 1 + n % 512 for n, name in enumerate(names)}
    found = config(rank_pattern=patterns, alpha_pattern=patterns)
    assert [found.rank_of(name) for name in names] == list(patterns.values())
    assert {found.scale_of(name) for name in names} == {1.0}


@pytest.mark.parametrize("key", ["q_proj", "a.b", "a.b.c", ".b", "layers.1", "b.", "a_b"])
@pytest.mark.parametrize("module", ["a.b", "x.a.b", "xa.b", "axb", "a.b.c", "layers.1", "b.x"])
def test_plain_pattern_equals_regular_expression(key, module):
    found = config(rank_pattern={key: 3})
    assert (found.rank_of(module) == 3) == bool(re.match(rf"(.*\.)?({key})$", module))


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def shapes(model):
    from formats.checkpoint import CheckpointReader
    from formats.families import FAMILIES
    from formats.peft.lora import adapted_shapes

    reader = CheckpointReader(model)
    return adapted_shapes(FAMILIES[reader.config["architectures"][0]], reader.config)


@pytest.fixture
def folder(model, tmp_path):
    return write_adapter(model, tmp_path / "adapter", rank=3, only=["q_proj", "up_proj"])


def test_adapter_folder_is_read(folder, shapes):
    found = read_adapter(folder, shapes, max_rank=3)
    assert len(found.pairs) == 6 and found.rank == 3
    stored = load_file(folder / "adapter_model.safetensors")
    pair = found.pairs[Q0]
    assert torch.equal(pair.a_rK, stored[f"base_model.model.{Q0}.lora_A.weight"])
    want = 8 / 3 * (pair.b_Nr.double() @ pair.a_rK.double())
    torch.testing.assert_close(pair.delta().double(), want)


def test_names_under_vision_language_prefix(folder, shapes):
    path = folder / "adapter_model.safetensors"
    renamed = {
        name.replace("model.model.layers", "model.model.language_model.layers"): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(renamed, path)
    assert Q0 in read_adapter(folder, shapes).pairs


def _at_call(number, change):
    """An `is_wanted` that makes a change when it is called for the n-th time."""
    calls = iter(range(number))

    def is_wanted():
        if next(calls, None) == number - 1:
            change()
        return True

    return is_wanted


@pytest.fixture
def other(folder, tmp_path):
    """Copy of the adapter with twice the weights."""
    found = shutil.copytree(folder, tmp_path / "other")
    path = found / "adapter_model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(path).items()}, path)
    return found


@pytest.mark.parametrize("call", [1, 7, 9], ids=["before a pair", "before data", "amid data"])
def test_weights_replaced_during_reading_are_refused(folder, other, shapes, call):
    """Never a mixture of two files, as long as each replaces the other whole."""
    path = folder / "adapter_model.safetensors"
    change = (other / path.name).replace
    with pytest.raises(CheckpointError, match="was replaced or changed while it was read"):
        read_adapter(folder, shapes, is_wanted=_at_call(call, lambda: change(path)))
    assert len(read_adapter(folder, shapes).pairs) == 6


def test_link_changed_during_reading_is_harmless(folder, other, shapes, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder)
    want = read_adapter(folder, shapes)

    def move():
        link.unlink()
        link.symlink_to(other)

    found = read_adapter(link, shapes, is_wanted=_at_call(1, move))
    assert all(torch.equal(found.pairs[name].a_rK, pair.a_rK) for name, pair in want.pairs.items())


def test_pickle_with_other_than_tensors_is_refused(folder, shapes, tmp_path):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    path.unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    assert len(read_adapter(folder, shapes).pairs) == 6
    torch.save({"x": shutil.rmtree}, folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_adapter(folder, shapes)
    torch.save([1], folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="expected tensors by name"):
        read_adapter(folder, shapes)


def _edit(change):
    def apply(folder):
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


def _state(**fields):
    def apply(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return apply


def _edit_text(before, after):
    def apply(folder):
        path = folder / "adapter_config.json"
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))

    return apply


def _write_header(folder, header):
    data = json.dumps(header).encode()
    path = folder / "adapter_model.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(4))


A, B = (f"base_model.model.{Q0}.lora_{part}.weight" for part in "AB")
BROKEN = {
    "half a pair": (_edit(lambda t: t.pop(B)), "q_proj: has lora_A alone"),
    "NaN": (_edit(lambda t: t[A].fill_(float("nan"))), "holds NaN or infinity"),
    "another rank": (_edit(lambda t: t.update({A: t[A][:2].clone()})), r"expected \[3, 64\]"),
    "another width": (_edit(lambda t: t.update({B: t[B][:-1].clone()})), r"expected \[128, 3\]"),
    "integers": (_edit(lambda t: t.update({A: t[A].int()})), "expected floats"),
    "router": (
        _edit(lambda t: t.update({A.replace("self_attn.q_proj", "mlp.gate"): t[A].clone()})),
        "adapts model.layers.0.mlp.gate, which is not a linear",
    ),
    "embedding": (
        _edit(
            lambda t: t.update(
                {"base_model.model.model.embed_tokens.lora_embedding_A": t[A].clone()}
            )
        ),
        "adapts the embedding; not supported",
    ),
    "DoRA": (
        _edit(lambda t: t.update({A.replace("A.weight", "magnitude_vector"): t[A][0].clone()})),
        "is DoRA's",
    ),
    "saved module": (
        _edit(lambda t: t.update({"base_model.model.lm_head.weight": t[A].clone()})),
        "is not a tensor of a LoRA adapter",
    ),
    "missing target": (_state(target_modules=["q_proj", "up_proj", "o_proj"]), "has no tensors"),
    "unnamed": (_state(target_modules=["up_proj"]), "does not name it"),
    "rank pattern": (_state(rank_pattern={"q_proj": 2}), r"expected \[2, 64\], found \[3, 64\]"),
    "nothing": (_edit(lambda t: t.clear()), "holds no tensors"),
    "cut off": (
        lambda f: (f / "adapter_model.safetensors").write_bytes(
            (f / "adapter_model.safetensors").read_bytes()[:-9]
        ),
        "truncated",
    ),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "has neither"),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "no folder": (shutil.rmtree, "is not a folder"),
    "float64 beyond float32": (
        _edit(lambda t: t.update({A: t[A].double().fill_(1e300)})),
        "holds NaN or infinity",
    ),
    "number beyond float32": (
        _edit_text('"lora_alpha": 8', '"lora_alpha": 1e308'),
        "adapter_config.json: expected numbers within float32, found 1e308",
    ),
    "number of 400 digits": (
        _edit_text('"lora_alpha": 8', '"lora_alpha": ' + "9" * 400),
        "expected numbers within float32, found one of 400 digits",
    ),
    "config of megabytes": (
        _state(alpha_pattern={f"n{i}": 1 for i in range(100_000)}),
        "the limit is",
    ),
    "header with a number of 400 digits": (
        lambda f: _write_header(
            f, {A: {"dtype": "F32", "shape": [10**400, 1], "data_offsets": [0, 4]}}
        ),
        "header is damaged: expected numbers within float32",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folder_is_refused(folder, shapes, name):
    damage, match = BROKEN[name]
    damage(folder)
    with pytest.raises(CheckpointError, match=match):
        read_adapter(folder, shapes)


def test_rank_above_server_limit_is_refused(folder, shapes):
    with pytest.raises(CheckpointError, match=r"at most 2, found 3 \(raise --max-lora-rank\)"):
        read_adapter(folder, shapes, max_rank=2)


def test_reading_stops_if_no_request_waits(folder, shapes):
    asked = []

    def is_wanted():
        asked.append(1)
        return len(asked) < 4

    with pytest.raises(CheckpointError, match="no request waits for it"):
        read_adapter(folder, shapes, is_wanted=is_wanted)
    assert len(asked) == 4


def test_adapter_follows_transform_scales():
    generator = torch.Generator().manual_seed(0)
    a_rK, b_Nr, weight_NK = (
        torch.randn(shape, generator=generator) for shape in ((3, 7), (5, 3), (5, 7))
    )
    inputs_K, outputs_N = (torch.rand(size, generator=generator) + 0.5 for size in (7, 5))
    pair = LoraPair(a_rK=a_rK.half(), b_Nr=b_Nr.half(), scale=0.5)

    def scaled(each_NK):
        return each_NK * inputs_K / outputs_N[:, None]

    found = scaled(weight_NK) + pair.fitted(inputs_K, outputs_N).delta()
    torch.testing.assert_close(found, scaled(weight_NK + pair.delta()))
    assert pair.fitted(None, None).a_rK is pair.a_rK
