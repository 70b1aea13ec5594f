"""Folders of draft heads: recognized layouts, defaults of each layout, unknown tensor names."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.errors import CheckpointError
from formats.heads.config import EAGLE3, default_aux_layers, head_kind, read_head_config
from formats.heads.folder import HeadFolder, kind_of_folder, read_torch_file
from formats.heads.inspect import inspect_head
from formats.heads.save import save_eagle3, save_medusa
from formats.heads.tensors import canonical, linears, required

LAYER = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
FLAT = {**LAYER, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": 40}
NESTED = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "transformer_layer_config": {**LAYER, "num_hidden_layers": 1},
    "draft_vocab_size": 40,
}


def tensors_of(config, **more):
    shapes = {f"{name}.weight": shape for name, shape in linears(config).items()}
    shapes |= required(config)
    offsets = {"d2t": torch.arange(40) // 2} if config.draft_vocab_size == 40 else {}
    return {**{name: torch.randn(shape) for name, shape in shapes.items()}, **offsets, **more}


def write(folder, config, tensors, first="layers.0"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name.replace("layers.0", first): tensor for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "config, first, expected",
    [
        (FLAT, "midlayer", False),
        (NESTED, "layers.0", True),  # what was written before there was a choice
        ({**NESTED, "norm_before_residual": False}, "layers.0", False),
        ({**FLAT, "norm_before_residual": True}, "model.midlayer", True),
    ],
)
def test_norm_before_residual_follows_the_layout(config, first, expected, tmp_path):
    read = read_head_config(config, EAGLE3)
    folder = HeadFolder(write(tmp_path, config, tensors_of(read), first))
    assert folder.config.norm_before_residual is expected
    assert folder.config.num_layers == 1 and folder.config.head_dim == 8
    assert folder.stored("layers.0.self_attn.q_proj") == f"{first}.self_attn.q_proj"
    assert folder.linear_shapes()["layers.0.self_attn.q_proj"] == (32, 64)


def test_default_and_explicit_aux_layers():
    assert default_aux_layers(32) == (2, 16, 29) and default_aux_layers(8) == (2, 4, 5)

    def aux_layers(config, layers, ids):
        stated = {**config, "eagle_aux_hidden_state_layer_ids": ids}
        return read_head_config(stated, EAGLE3).aux_layers(layers)

    # SGLang counts from the layer whose output it is; speculators counts layers
    assert aux_layers(FLAT, 36, [1, 17, 32]) == (2, 18, 33)
    assert aux_layers(NESTED, 36, [1, 17, 32]) == (1, 17, 32)
    assert aux_layers(FLAT, 36, [2, 18, 33]) == (2, 18, 33)  # the usual ones, whoever wrote them
    inner = {**FLAT, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}
    assert read_head_config(inner, EAGLE3).aux_layers(36) == (2, 18, 33)
    with pytest.raises(CheckpointError, match="expected 3 auxiliary layers of a target model with"):
        aux_layers(NESTED, 8, [2, 4, 9])


def test_head_kinds_are_detected(tmp_path):
    assert head_kind(FLAT) == head_kind(NESTED) == "eagle3"
    assert head_kind({"architectures": ["LlamaForCausalLMEagle3"]}) == "eagle3"
    assert head_kind({"architectures": ["EagleLlamaForCausalLM"]}) == "eagle"
    assert head_kind({"medusa_num_heads": 2}) == "medusa"
    assert head_kind(LAYER) is None
    # without a word in config.json the tensors say it
    plain = {key: value for key, value in FLAT.items() if key != "draft_vocab_size"}
    read = replace(read_head_config(FLAT, EAGLE3), draft_vocab_size=64)
    folder = write(tmp_path / "plain", plain, tensors_of(read))
    assert HeadFolder(folder).config.kind == kind_of_folder(folder) == "eagle3"
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": torch.zeros(2, 2)}, folder / "pytorch_model.bin")
    assert kind_of_folder(folder) == "eagle"
    assert kind_of_folder(tmp_path) is None


@pytest.mark.parametrize("kind", ["dflash2", "mlp"])
def test_unsupported_kinds_are_refused_by_name(kind, tmp_path):
    config = {**NESTED, "speculators_model_type": kind}
    write(tmp_path, config, {"fc.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=f"expected a head of kind eagle3, .*found '{kind}'"):
        HeadFolder(tmp_path)


def test_unknown_tensors_are_refused_by_name(tmp_path):
    tensors = tensors_of(read_head_config(FLAT, EAGLE3), mask_hidden=torch.zeros(1, 96))
    write(tmp_path, FLAT, tensors)
    with pytest.raises(CheckpointError, match="mask_hidden: does not belong in a head of the kind"):
        HeadFolder(tmp_path)


def test_missing_and_misshapen_tensors_are_refused_by_name(tmp_path):
    tensors = tensors_of(read_head_config(FLAT, EAGLE3))
    fewer = {name: tensor for name, tensor in tensors.items() if "hidden_norm" not in name}
    write(tmp_path / "fewer", FLAT, fewer)
    with pytest.raises(CheckpointError, match="layers.0.hidden_norm.weight: is missing"):
        HeadFolder(tmp_path / "fewer")
    without = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    write(tmp_path / "without", FLAT, without)
    with pytest.raises(CheckpointError, match="lm_head: is missing"):
        HeadFolder(tmp_path / "without")  # the target's does not fit 40 draft tokens
    other = {**tensors, "fc.weight": torch.zeros(32, 64)}
    write(tmp_path / "other", FLAT, other)
    with pytest.raises(CheckpointError, match=r"fc.weight: expected \[32, 96\].* found \[32, 64\]"):
        HeadFolder(tmp_path / "other")


@pytest.mark.parametrize(
    "key, value",
    [
        ("hidden_size", "32"),
        ("norm_output", 1),
        ("draft_vocab_size", 0),
        ("eagle_aux_hidden_state_layer_ids", [1.5]),
        ("hidden_act", "gelu"),
        ("model_type", "mamba"),
    ],
)
def test_keys_with_wrong_type_are_refused_by_name(key, value):
    with pytest.raises(CheckpointError, match=f"config.json {key}"):
        read_head_config({**FLAT, key: value}, EAGLE3)


def test_old_aux_norm_names_are_read():
    assert canonical("aux_norm_mid.weight") == "fc_norm.1.weight"
    assert canonical("model.midlayer.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    assert canonical("medusa_head.0.1.weight") == "0.1.weight"


def test_aux_norm_is_detected_by_tensors(tmp_path):
    """Older configs have no key for it."""
    config = read_head_config(FLAT, EAGLE3)
    norms = {f"aux_norm_{n}.weight": torch.ones(32) for n in ("low", "mid", "high")}
    folder = HeadFolder(write(tmp_path, FLAT, tensors_of(config, **norms)))
    assert folder.config.fc_norm and not folder.config.norm_before_fc


class UnsafePickle:
    def __reduce__(self):
        return (print, ("code of a file was run",))


def test_torch_files_run_no_code(tmp_path, capsys):
    torch.save({"0.1.weight": torch.zeros(2), "x": UnsafePickle()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="cannot be read as plain tensors"):
        read_torch_file(tmp_path / "medusa_lm_head.pt")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="expected tensors by name"):
        read_torch_file(tmp_path / "list.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "list.pt").read_bytes()[:200])
    with pytest.raises(CheckpointError, match="cut.pt: cannot be read as plain tensors"):
        read_torch_file(tmp_path / "cut.pt")
    assert "code" not in capsys.readouterr().out


def test_pytorch_model_bin_is_read(tmp_path):
    """As the first heads were published."""
    tensors = tensors_of(read_head_config(FLAT, EAGLE3))
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    stored = {name.replace("layers.0", "midlayer"): t for name, t in tensors.items()}
    torch.save(stored, tmp_path / "pytorch_model.bin")
    folder = HeadFolder(tmp_path)
    assert torch.equal(
        folder.get("midlayer.mlp.up_proj.weight"), stored["midlayer.mlp.up_proj.weight"]
    )


@pytest.mark.parametrize("aux_layers", [(), (1, 2, 3)])
def test_both_layouts_give_the_same_head(aux_layers, tmp_path):
    config = replace(
        read_head_config(NESTED, EAGLE3), explicit_aux_layers=aux_layers, norm_output=True
    )
    tensors = tensors_of(config)
    verifier = {"num_hidden_layers": 4, "architectures": ["LlamaForCausalLM"]}
    if not aux_layers:
        verifier["num_hidden_layers"] = 8
    for layout in ("original", "speculators"):
        save_eagle3(tmp_path / layout, config, tensors, layout=layout, verifier=verifier)
        folder = HeadFolder(tmp_path / layout)
        assert folder.config.layout == layout
        same = replace(
            folder.config,
            layout=config.layout,
            explicit_aux_layers=aux_layers,
            values=config.values,
        )
        assert same == config
        assert folder.config.aux_layers(verifier["num_hidden_layers"]) == (aux_layers or (2, 4, 5))
        for name, tensor in tensors.items():
            assert torch.equal(folder.get(folder.stored(name)), tensor)
    names = load_file(tmp_path / "original" / "model.safetensors").keys()
    assert "midlayer.hidden_norm.weight" in names and "d2t" in names


def test_aux_layers_inexpressible_in_flat_config_are_refused(tmp_path):
    """One more than the usual ones would be read as the usual ones."""
    config = replace(read_head_config(NESTED, EAGLE3), explicit_aux_layers=(3, 5, 6))
    with pytest.raises(CheckpointError, match="mistake these layers for the default"):
        save_eagle3(
            tmp_path / "head",
            config,
            tensors_of(config),
            layout="original",
            verifier={"num_hidden_layers": 8},
        )
    assert not (tmp_path / "head").exists()


def test_medusa_is_saved_in_original_layout(tmp_path):
    config = read_head_config({"medusa_num_heads": 1}, "medusa")
    shapes = {"0.0.linear.weight": (4, 4), "0.0.linear.bias": (4,), "0.1.weight": (9, 4)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_medusa(tmp_path / "heads", config, tensors, "some/model")
    folder = HeadFolder(tmp_path / "heads")
    assert (tmp_path / "heads" / "medusa_lm_head.safetensors").exists()
    assert folder.raw["base_model_name_or_path"] == "some/model"
    assert torch.equal(folder.get("0.1.weight"), tensors["0.1.weight"])


AXES = {"type": "mrope", "mrope_section": [1, 2, 1], "mrope_interleaved": True}


@pytest.mark.parametrize(
    "config, reads_images, axis_pairs",
    [
        (FLAT, True, ()),
        ({**FLAT, "rope_scaling": AXES}, True, (1, 2, 1)),  # as SpecForge writes it
        ({**FLAT, "rope_scaling": AXES, "image_embeddings": False}, False, (1, 2, 1)),
        # AngelSlim trains with three axes, but placeholders
        (
            {**FLAT, "architectures": ["Eagle3LlamaForCausalLM"], "rope_scaling": AXES},
            False,
            (1, 2, 1),
        ),
        (NESTED, False, ()),
        ({**NESTED, "image_embeddings": True}, True, ()),
    ],
)
def test_image_token_handling_of_heads(config, reads_images, axis_pairs, tmp_path):
    read = read_head_config(config, EAGLE3)
    assert (read.reads_images, read.axis_pairs) == (reads_images, axis_pairs)
    assert read.has_interleaved_axes == bool(axis_pairs)
    folder = write(tmp_path / "head", config, tensors_of(read))
    line = next((each for each in inspect_head(folder).facts if "images" in each), "")
    assert ("placeholder" in line) == (bool(line) and not reads_images)
    for layout in ("original", "speculators"):
        stated = replace(read, image_embeddings=reads_images)
        out = tmp_path / layout
        save_eagle3(out, stated, tensors_of(read), layout=layout, verifier={"num_hidden_layers": 8})
        found = HeadFolder(out).config
        assert (found.reads_images, found.axis_pairs) == (reads_images, axis_pairs)


@pytest.mark.parametrize("sections", ["24", [1, 2.5, 1], {"t": 1}])
def test_mrope_axes_of_wrong_type_are_refused(sections):
    config = {**FLAT, "rope_scaling": {"mrope_section": sections}}
    with pytest.raises(CheckpointError, match="mrope_section: expected three numbers, found"):
        read_head_config(config, EAGLE3)
