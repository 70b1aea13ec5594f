"""Tied heads: the stored tensors decide whether a model has a head of its own."""

import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.convert import convert_checkpoint
from formats.errors import InputError
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import round_to_nearest
from formats.inspection.inspect import inspect_checkpoint
from formats.save import save_quantized
from formats.scheme import QuantSpec
from tests.formats.inspection.findings import problem_of

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SPEC = QuantSpec(bits=4, symmetric=True, group_size=32)


def last_value_differs(tensors):
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1, -1] += 1


def is_copy(tensors):
    tensors[HEAD] = tensors[EMBEDDING].clone()


def is_copy_in_float32(tensors):
    tensors[HEAD] = tensors[EMBEDDING].float()


def is_more_precise(tensors):
    tensors[HEAD] = tensors[EMBEDDING].float() * 1.0001


def has_more_rows(tensors):
    tensors[HEAD] = torch.cat([tensors[EMBEDDING], tensors[EMBEDDING][:8]])


def is_float8(tensors):
    head = tensors.pop(HEAD).float()
    scale = head.abs().amax() / 448
    tensors[HEAD] = (head / scale).to(torch.float8_e4m3fn)
    tensors["lm_head.weight_scale"] = scale.reshape(1)


OWN = [last_value_differs, is_more_precise, has_more_rows, is_float8]
COPIES = [is_copy, is_copy_in_float32]


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("change", [*OWN, *COPIES])
def test_head_is_tied_only_if_it_equals_the_embedding(
    float_model, write_folder, change, num_shards
):
    tensors, config = float_model
    change(tensors)
    folder = write_folder(tensors, {**config, "tie_word_embeddings": True}, num_shards)
    assert CheckpointReader(folder).config["tie_word_embeddings"] == (change in COPIES)


def test_tie_flag_is_kept_without_contradicting_tensors(float_model, write_folder, tmp_path):
    tensors, config = float_model
    folder = write_folder(tensors, config)
    assert CheckpointReader(folder).config == config
    folder.rename(tmp_path / "untied")
    del tensors[HEAD]
    folder = write_folder(tensors, {**config, "tie_word_embeddings": True})
    assert CheckpointReader(folder).config["tie_word_embeddings"] is True
    assert not inspect_checkpoint(folder).problems


def test_tied_by_default_family_is_untied_by_distinct_head(float_model, write_folder):
    tensors, config = float_model
    config = {**config, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    del config["tie_word_embeddings"]
    assert CheckpointReader(write_folder(tensors, config)).config["tie_word_embeddings"] is False


def test_missing_embedding_is_read_from_tied_head(float_model, write_folder):
    """transformers ties in both directions (PreTrainedModel.tie_weights)."""
    tensors, config = float_model
    expected = tensors[HEAD]
    del tensors[EMBEDDING]
    folder = write_folder(tensors, {**config, "tie_word_embeddings": True})
    reader = CheckpointReader(folder)
    assert torch.equal(reader.get(EMBEDDING), expected) and HEAD not in reader
    assert not inspect_checkpoint(folder).problems


def test_inspect_distinguishes_head_from_embedding_copy(float_model, write_folder, tmp_path):
    tensors, config = float_model
    config["tie_word_embeddings"] = True
    folder = write_folder(tensors, config)
    problem_of(inspect_checkpoint(folder), "warning", "tie_word_embeddings", "differs from the emb")
    folder.rename(tmp_path / "own")
    is_copy(tensors)
    problem_of(
        inspect_checkpoint(write_folder(tensors, config)), "warning", HEAD, "is a copy of the emb"
    )


def test_inspect_checks_shape_of_untied_head(float_model, write_folder):
    tensors, config = float_model
    has_more_rows(tensors)
    found = inspect_checkpoint(write_folder(tensors, {**config, "tie_word_embeddings": True}))
    assert [p.subject for p in found.problems if p.severity == "error"] == [HEAD]


def test_convert_and_save_write_untied_head(model, float_model, write_folder, tmp_path):
    tensors, config = model("gptq", "w4a16-sym-g32")
    head = tensors[HEAD]
    folder = write_folder(tensors, {**config, "tie_word_embeddings": True})
    convert_checkpoint(folder, tmp_path / "converted", "compressed-tensors")
    written = CheckpointReader(tmp_path / "converted")
    assert torch.equal(written.get(HEAD), head) and not written.unties_head
    assert written.config["tie_word_embeddings"] is False

    folder.rename(tmp_path / "quantized")
    tensors, config = float_model
    folder = write_folder(tensors, {**config, "tie_word_embeddings": True})
    name = "model.layers.0.mlp.up_proj"
    weight = PackedWeight.from_float(tensors[f"{name}.weight"], SPEC)
    save_quantized(tmp_path / "saved", folder, {name: weight}, readers=())
    written = CheckpointReader(tmp_path / "saved")
    assert torch.equal(written.get(HEAD), head) and not written.unties_head
    quantized_head = round_to_nearest(head, SPEC)
    with pytest.raises(InputError, match="32"):  # 40 rows: gptq wants 32, and asks no flag
        save_quantized(
            tmp_path / "head", folder, {"lm_head": quantized_head}, format="gptq", readers=()
        )
    folder.rename(tmp_path / "own")
    is_copy(tensors)
    folder = write_folder(tensors, {**config, "tie_word_embeddings": True})
    with pytest.raises(InputError, match="lm_head: is the embedding"):
        save_quantized(tmp_path / "head", folder, {"lm_head": quantized_head}, readers=())
