"""Published layouts of DFlash, DSpark and P-EAGLE heads: config.json and tensors."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.errors import CheckpointError
from formats.heads import tensors as names
from formats.heads.block_config import BlockAttention
from formats.heads.config import head_kind, read_head_config
from formats.heads.folder import HeadFolder, kind_of_folder
from formats.heads.inspect import inspect_head
from formats.heads.save import save_block, save_eagle3

LAYER = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
IDS = {"block_size": 16, "mask_token_id": 60, "target_layer_ids": [1, 5]}
# as in z-lab/Qwen3.5-35B-A3B-DFlash: the last layer alone sees everything
ZLAB = {
    **LAYER,
    "architectures": ["DFlashDraftModel"],
    "dflash_config": IDS,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4096,
    "num_target_layers": 8,
}
DEEPSPEC = {
    **LAYER,
    **IDS,
    "block_size": 7,
    "architectures": ["Qwen3DSparkModel"],
    "markov_rank": 4,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
NESTED = {
    "speculators_model_type": "dspark",
    "transformer_layer_config": LAYER,
    "aux_hidden_state_layer_ids": [2, 6],
    "block_size": 8,
    "mask_token_id": 60,
    "markov_rank": 4,
    "draft_vocab_size": 40,
}
# as in amazon/GPT-OSS-20B-P-EAGLE and in speculators
AMAZON = {**LAYER, "model_type": "llama", "draft_vocab_size": 40, "ptd_token_id": 60}
PEAGLE = {
    "speculators_model_type": "peagle",
    "transformer_layer_config": LAYER,
    "draft_vocab_size": 40,
    "mask_token_id": 61,
}


def tensors_of(config):
    found = {f"{name}.weight": shape for name, shape in names.linears(config).items()}
    found |= names.required(config)
    return {name: torch.randn(shape) for name, shape in found.items()}


def write(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "config, kind",
    [(ZLAB, "dflash"), (DEEPSPEC, "dspark"), (NESTED, "dspark"), (AMAZON, "peagle")],
)
def test_head_kinds_are_detected(config, kind, tmp_path):
    assert head_kind(config) == kind
    folder = write(tmp_path, config, tensors_of(read_head_config(config, kind)))
    assert kind_of_folder(folder) == HeadFolder(folder).config.kind == kind
    assert inspect_head(folder).ok and "in one pass" in inspect_head(folder).to_text()


def test_state_indices_follow_each_layout():
    """A flat config names the layer whose output a state is; speculators counts the layers."""
    assert read_head_config(ZLAB, "dflash").aux_layers(8) == (2, 6)
    assert read_head_config(NESTED, "dspark").aux_layers(8) == (2, 6)
    embedding = {**DEEPSPEC, "target_layer_ids": [-1, 7]}
    assert read_head_config(embedding, "dspark").aux_layers(8) == (0, 8)
    with pytest.raises(
        CheckpointError,
        match="target_layer_ids: expected auxiliary layers of a target model with 5",
    ):
        read_head_config(ZLAB, "dflash").aux_layers(5)


def test_block_attention_rows_and_windows():
    def seen(**more):
        return read_head_config({**ZLAB, **more}, "dflash").attentions

    everything = BlockAttention(is_causal=False, window=None)
    assert seen() == (BlockAttention(is_causal=True, window=4096), everything)
    assert seen(is_causal=False)[0] == BlockAttention(is_causal=False, window=4096)
    assert seen(layer_types=None) == (everything, everything)
    # as in MiMo's: all layers have a window, and none is causal
    inner = {**IDS, "use_swa": True, "swa_window_size": 9}
    assert (
        seen(layer_types=None, dflash_config=inner)
        == (BlockAttention(is_causal=False, window=9),) * 2
    )
    with pytest.raises(CheckpointError, match="sliding_window: expected a number"):
        seen(sliding_window=None)


def test_number_of_drafts_by_head_kind():
    """DFlash's newest token predicts nothing; DSpark's predicts the first draft."""
    assert read_head_config(ZLAB, "dflash").max_drafts == 15
    assert read_head_config(DEEPSPEC, "dspark").max_drafts == 7
    fills = read_head_config({**NESTED, "sample_from_anchor": False}, "dspark")
    assert fills.max_drafts == 7 and not fills.samples_anchor


@pytest.mark.parametrize(
    "changed, problem",
    [
        ({"target_layer_ids": []}, "target_layer_ids: is missing"),
        ({"mask_token_id": None}, "mask_token_id: expected a number of 0 or more, found None"),
        ({"markov_head_type": "lstm"}, "markov_head_type: expected one of vanilla, gated, rnn"),
        ({"attention_sink_bias": True}, "attention_sink_bias: expected False, found True"),
        ({"dflash_config": [1]}, "dflash_config: expected an object"),
        ({"logit_scale": "1"}, "logit_scale: expected a number"),
    ],
)
def test_unsupported_keys_are_refused_by_name(changed, problem):
    with pytest.raises(CheckpointError, match=problem):
        read_head_config({**DEEPSPEC, **changed}, "dspark")


def test_dflash_2_is_refused_by_name(tmp_path):
    config = {**ZLAB, "architectures": ["DFlash2DraftModel"]}
    write(tmp_path, config, {"fc.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match="architectures: .*dflash, dspark, found 'dflash2'"):
        HeadFolder(tmp_path)


@pytest.mark.parametrize("config", [ZLAB, DEEPSPEC, NESTED])
def test_both_layouts_give_the_same_head(config, tmp_path):
    read = read_head_config(config, head_kind(config))
    if config is not NESTED:  # counted as speculators does
        read = replace(read, explicit_aux_layers=(2, 6))
    tensors = tensors_of(read)
    if read.draft_vocab_size < 64:
        tensors |= {"d2t": torch.arange(40), "t2d": torch.zeros(64, dtype=torch.bool)}
    for layout in ("original", "speculators"):
        out = tmp_path / layout
        save_block(out, read, tensors, layout=layout, verifier={"num_hidden_layers": 8})
        found = HeadFolder(out).config
        assert found.aux_layers(8) == (2, 6)
        same = replace(
            found,
            layout=read.layout,
            explicit_aux_layers=read.explicit_aux_layers,
            values=read.values,
        )
        assert same == read
        assert load_file(out / "model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize("config", [AMAZON, PEAGLE])
def test_parallel_head_layouts(config, tmp_path):
    read = read_head_config(config, "peagle")
    assert read.mask_token_id in (60, 61) and not read.norm_before_residual
    tensors = {**tensors_of(read), "mask_hidden": torch.randn(1, 1, 96)}
    tensors |= {"d2t": torch.arange(40)}
    for layout in ("original", "speculators"):
        out = tmp_path / layout
        save_eagle3(out, read, tensors, layout=layout, verifier={"num_hidden_layers": 8})
        folder = HeadFolder(out)
        assert kind_of_folder(out) == "peagle"
        assert replace(folder.config, layout=read.layout, values=read.values) == read
        assert torch.equal(folder.get("mask_hidden"), tensors["mask_hidden"])
