"""Training and quantization of heads that draft in one pass."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from calibrate.heads.block import BlockModule, block_losses, even_anchors, seen_keys
from calibrate.heads.parallel import parallel_losses
from calibrate.heads.quantize import quantize_head
from formats.heads.block_config import BlockAttention
from formats.heads.folder import HeadFolder
from formats.heads.inspect import inspect_head
from formats.scheme import Scheme
from tests.qserve.speculation.docs_heads import CONFIGS, write_docs_head

ROOT = Path(__file__).resolve().parent.parent.parent
W4 = Scheme.parse("w4a16-sym", 32)
TRAININGS = {
    "dflash": ("train_dflash", "--layers", "1", "--block", "4", "--after-errors", "0.1"),
    "dspark": ("train_dflash", "--layers", "1", "--block", "4", "--markov-rank", "32"),
    "peagle": ("train_eagle3", "--parallel", "3", "--after-errors", "0.1"),
    "eagle3": ("train_eagle3", "--eagle31", "--steps", "2"),
}


@pytest.mark.parametrize(
    "kind",
    ["dflash", *(pytest.param(k, marks=pytest.mark.exhaustive) for k in ("dspark", "peagle"))],
)
def test_block_heads_are_calibrated_on_target_states(kind, docs_5m, tmp_path):
    source = write_docs_head(tmp_path / "head", kind)
    report = quantize_head(
        source,
        tmp_path / "codes",
        scheme=W4,
        target=docs_5m,
        samples=2,
        sequence_length=40,
        progress=False,
    )
    assert report.recipe == "gptq" and report.left_in_float == {}
    modules = {linear.name for linear in report.linears}
    assert {"fc", "layers.1.self_attn.k_proj"} <= {
        m.replace("midlayer", "layers.0") for m in modules
    }
    assert all(linear.output_error < 0.3 for linear in report.linears)
    assert len(report.accuracy_after) == 7
    inspection = inspect_head(tmp_path / "codes")
    assert inspection.ok and {linear.scheme for linear in inspection.linears} == {str(W4)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", TRAININGS)
def test_training_writes_servable_head(kind, docs_5m, tmp_path, monkeypatch):
    """The scripts as users run them."""
    script, *more = TRAININGS[kind]
    data = tmp_path / "texts.jsonl"
    data.write_text(json.dumps({"text": (docs_5m / "README.md").read_text()}))
    small = ("--length", "32", "--batch", "4", "--intermediate-size", "64")
    small += ("--data", str(data), "--device", "cpu", "--continued", "0", "--seconds", "5")
    arguments = [str(docs_5m), *small, *more, "--output", str(tmp_path / "out")]
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")
    report = json.loads((tmp_path / "out" / "training.json").read_text())
    assert report["batches"] >= 1 and len(report["accuracy_of_steps"]) >= 3
    heads = [HeadFolder(tmp_path / "out" / layout) for layout in ("original", "speculators")]
    assert [head.config.kind for head in heads] == [kind] * 2
    assert heads[0].config.aux_layers(4) == heads[1].config.aux_layers(4)
    name = "layers.0.mlp.down_proj.weight"
    assert torch.equal(*(head.get(head.stored(name)) for head in heads))
    weights = load_file(tmp_path / "out" / "original" / "model.safetensors")
    assert report["parameters"] == sum(each.numel() for each in weights.values())
    if kind == "eagle3":
        assert heads[0].config.fc_norm and heads[0].config.norm_output


def test_block_rows_attend_to_context_and_own_block():
    """Two blocks of 3 rows at 2 and 4 of a window of 6; a window of 3 keys."""

    def seen(**attention):
        keys = seen_keys(BlockAttention(**attention), 3, torch.tensor([2, 4]), 3, 6)
        return ["".join(".x"[int(each)] for each in row) for row in keys]

    assert seen(is_causal=False, window=None) == ["xx....xxx..."] * 3 + ["xxxx.....xxx"] * 3
    assert seen(is_causal=True, window=3) == [
        "xx....x.....",
        ".x....xx....",
        "......xxx...",
        "..xx.....x..",
        "...x.....xx.",
        ".........xxx",
    ]
    # counted from the end of a block of 3
    assert seen(is_causal=False, window=1)[3:] == ["...x.....xxx"] * 3


def test_block_is_independent_of_tokens_after_anchor():
    """Neither on later states nor on other blocks. DSpark's drafts read earlier tokens."""
    from formats.heads.config import read_head_config

    for kind in ("dflash", "dspark"):
        config = read_head_config(CONFIGS[kind], kind)
        torch.manual_seed(1)
        head = BlockModule(config, torch.randn(8192, 256))
        if config.markov_rank:
            torch.nn.init.normal_(head.markov_head.markov_w2.weight)
        ids, aux = torch.randint(0, 8000, (1, 24)), torch.randn(1, 24, 512)
        with torch.no_grad():
            one = head(ids, aux, torch.tensor([5, 9]), 3)[0, 1]
            later = aux.clone()
            later[:, 9:] = 7.0
            other = head(ids, later, torch.tensor([9]), 3)[0, 0]
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            changed = ids.clone()
            changed[:, 10] = 8001  # the token that the first draft predicts
            again = head(changed, aux, torch.tensor([9]), 3)[0, 0]
        torch.testing.assert_close(one[0], again[0], rtol=1e-4, atol=1e-4)
        assert torch.allclose(one[1], again[1], rtol=1e-3, atol=1e-3) == (kind == "dflash")


def test_anchors_leave_space_for_drafts():
    for length in (9, 12, 100):
        anchors = even_anchors(length, 7, 8)
        assert int(anchors.min()) >= 1 and int(anchors.max()) + 7 < length


class ConstantHead(torch.nn.Module):
    """Drafts two tokens with probabilities that depend on nothing; both kinds of passes."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(2, 8))

    def forward(self, ids_BS, aux_BSF, anchors_A, num_drafts):
        return self.logits.expand(len(ids_BS), len(anchors_A), num_drafts, -1)

    def parallel(self, ids_BS, aux_BSF, anchors_A, num_drafts):
        rest_RV = torch.zeros(ids_BS.shape[1] - 2, 8)  # rows that are no anchors
        yield torch.cat([self.logits[:1], rest_RV]).expand(len(ids_BS), -1, -1)
        yield self.logits[1].expand(len(ids_BS), len(anchors_A), -1)


@pytest.mark.parametrize(("losses", "anchor"), [(block_losses, 1), (parallel_losses, 0)])
@pytest.mark.parametrize("draft_ids", [None, [7, 6, 5, 4, 3, 2, 1, 0]])
def test_later_drafts_follow_most_likely_first_draft(losses, anchor, draft_ids):
    """Texts continue with "1 4" (40 %), "2 5" and "3 5" (30 % each).

    The likeliest second token is 5. But after 1, the likeliest first token, it is 4.
    """
    ends = [[1, 4]] * 4 + [[2, 5]] * 3 + [[3, 5]] * 3
    ids_BS = torch.tensor([[0, 0, *end, 0] for end in ends])
    # logits of the target: the next token of the text
    target_BSV = 20.0 * torch.nn.functional.one_hot(ids_BS.roll(-1, 1), 8)
    if draft_ids is not None:
        draft_ids = torch.tensor(draft_ids)
    found = {}
    for after_errors in (1.0, 0.1):
        head = ConstantHead()
        optimizer = torch.optim.SGD(head.parameters(), lr=2.0)
        for _ in range(40):
            rows = losses(
                head,
                ids_BS,
                target_BSV,
                target_BSV,
                torch.tensor([anchor]),
                num_drafts=2,
                draft_ids_U=draft_ids,
                after_errors=after_errors,
            )
            optimizer.zero_grad()
            sum(loss for loss, _ in rows).backward()
            optimizer.step()
        best = head.logits.argmax(-1)
        found[after_errors] = (best if draft_ids is None else draft_ids[best]).tolist()
    assert found[1.0][1] == 5
    assert found[0.1][1] == 4
