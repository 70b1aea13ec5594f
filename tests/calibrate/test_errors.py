"""Errors of calibrate name the object and the remedy."""

import math

import pytest
import torch

from calibrate.layer_map import find_layer_map
from calibrate.texts.documents import read_documents
from formats.errors import CheckpointError, InputError
from formats.in_memory.weights import round_to_nearest
from formats.numerics.finite import BLOCK_NUMBERS, check_finite
from formats.scheme import Scheme


def test_unknown_architecture_is_one_short_line():
    with pytest.raises(InputError, match="found \\['FooForCausalLM'\\] \\(`qserve families`") as e:
        find_layer_map({"architectures": ["FooForCausalLM"]})
    assert len(str(e.value)) < 140


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"prompt": "a"}', "found an object with 'prompt' (rename the column of the texts"),
        ('{"text": "\\ud83d"}', "lone surrogate (half a character), which tokenizers reject (re"),
    ],
)
def test_rows_without_text_name_row_and_remedy(tmp_path, row, words):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "fine"}\n' + row + "\n")
    with pytest.raises(InputError) as error:
        read_documents(str(path))
    assert words in str(error.value) and "2" in error.value.subject


@pytest.mark.parametrize("scheme", ["w4a16-sym", "w8a8-fp8", "w4a16-mxfp4", "w4a16-nvfp4"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_first_wrong_value_is_named(scheme, value):
    weight_NK = torch.ones(5, 256)
    weight_NK[3, 7] = weight_NK[4, 0] = value
    with pytest.raises(CheckpointError) as error:
        round_to_nearest(weight_NK, Scheme.parse(scheme).weight, "mlp")
    words = "mlp: contains NaN or infinity: 2 of 1280 values, the first at [3, 7] (replace"
    assert str(error.value).startswith(words)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 4)])
def test_finite_tensors_of_any_shape_pass(shape):
    check_finite("x", torch.ones(shape))


def test_wrong_value_after_the_first_block_is_found():
    weight_NK = torch.ones(3, BLOCK_NUMBERS // 2 + 1, dtype=torch.float16)
    weight_NK[2, -1] = math.inf
    with pytest.raises(CheckpointError, match=f"the first at .2, {BLOCK_NUMBERS // 2}"):
        check_finite("x", weight_NK)
