"""Numbers that no model has are refused before anything is built of them."""

import json
import shutil

import pytest

from formats.architecture.variant_check import check_counts
from formats.errors import CheckpointError, InputError
from formats.inspection.inspect import inspect_checkpoint
from qserve.llm import LLM
from tests.conftest import make_tiny
from tests.tiny_families import TINY_FAMILIES


@pytest.mark.parametrize(
    "key, most",
    [
        ("num_hidden_layers", 10_000),
        *((key, 32_768) for key in ("num_experts", "num_local_experts", "n_routed_experts")),
    ],
)
def test_implausibly_large_count_is_refused_by_name(key, most):
    check_counts({key: most})
    check_counts({key: "many"})  # another check's
    with pytest.raises(CheckpointError, match=f"{key}: expected {most} or less, found {most + 1}"):
        check_counts({key: most + 1})


def test_huge_expert_count_raises_one_error(tmp_path):
    source = make_tiny(tmp_path / "source", *TINY_FAMILIES["qwen3_moe"])
    bad = shutil.copytree(source, tmp_path / "bad")
    config = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps(config | {"num_experts": 2**31 - 1}))
    with pytest.raises(InputError, match="num_experts: expected 32768 or less, found 2147483647"):
        LLM(str(bad), device="cpu")
    problems = inspect_checkpoint(bad).problems
    assert [each for each in problems if "experts.2147483646" in each.subject]
