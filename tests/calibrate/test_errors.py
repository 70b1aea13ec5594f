"""Every error of calibrate that a user can cause names its remedy."""

import ast
import math
from pathlib import Path

import pytest
import torch

import calibrate
from calibrate.layer_map import find_layer_map
from calibrate.texts.documents import read_documents
from formats.errors import CheckpointError, InputError
from formats.in_memory.weights import round_to_nearest
from formats.numerics.finite import BLOCK_NUMBERS, check_finite
from formats.scheme import Scheme

PREFIXES = ("Input", "Checkpoint", "Scheme", "Solver", "Journal", "Disk")
ERRORS = [f"{each}Error" for each in PREFIXES]
FOLDER = Path(calibrate.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))


def without_remedy(text: str) -> list[int]:
    """Return the lines of Python code that construct one of ERRORS without a remedy."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    named = [each for each in calls if isinstance(each.func, ast.Name) and each.func.id in ERRORS]
    return [
        each.lineno
        for each in named
        if len(each.args) < 3 and "remedy" not in {keyword.arg for keyword in each.keywords}
    ]


def test_every_error_has_a_remedy():
    found = {str(path.relative_to(FOLDER)): without_remedy(path.read_text()) for path in FILES}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_missing_remedies_are_found():
    code = 'raise InputError("a", "b")\nraise InputError("a", "b", "c")\nSolverError("a", "b")\n'
    assert without_remedy(code) == [1, 3]


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
