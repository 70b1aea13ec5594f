"""The table of families that `qserve families` prints, and the list in qserve/docs/models.md."""

import json
from pathlib import Path

from formats.architecture import family_table
from formats.architecture.text_part import WRAPPERS
from formats.families import FAMILIES
from qserve.cli import main

ROOT = Path(__file__).resolve().parents[3]


def test_models_page_lists_every_served_family():
    page = (ROOT / "qserve" / "docs" / "models.md").read_text()
    assert f"\n\n{family_table.to_markdown()}\n\n" in page


def test_families_command_lists_every_family(capsys):
    assert main(["families"]) == 0
    table, whole = capsys.readouterr().out.split("\n\n")
    lines = table.splitlines()
    assert len(lines) == 1 + len(FAMILIES)
    assert set(whole.strip().partition("\n")[2].replace("\n", " ").split(", ")) == set(WRAPPERS)
    row = next(line for line in lines if "Qwen3NextForCausalLM" in line)
    words = "Qwen3-Next Qwen3NextForCausalLM gated delta nets yes any drafter and its MTP layer"
    assert row.split() == words.split()


def test_families_json_equals_table(capsys):
    assert main(["families", "--json"]) == 0
    rows = {row["architecture"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == FAMILIES.keys()
    assert rows["Glm4MoeForCausalLM"]["speculation"] == "any drafter and its MTP layer"
    assert rows["Gemma2ForCausalLM"]["windows"] == "some"
    assert len({row["title"] for row in rows.values()}) == len(rows)
