"""Probe of a checkpoint: what it stores, and how far other logits are from it."""

import json

import pytest
import torch

from formats.errors import CheckpointError
from formats.quality.probe import EXACT_LIMIT, LIMIT, NUM_TOKENS, Probe
from formats.quality.record import QUALITY, read_quality

GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(0, 90, (50,), generator=GENERATOR)
LOGITS = 4 * torch.randn(50, 90, generator=GENERATOR)


def test_equal_logits_have_zero_distance_after_round_trip():
    probe = Probe.from_dict(json.loads(json.dumps(Probe.of(IDS, LOGITS, True).to_dict())))
    assert probe.token_ids == tuple(IDS[:NUM_TOKENS].tolist())
    assert probe.distance(LOGITS[:NUM_TOKENS]) < 1e-5
    assert probe.distance(LOGITS[:NUM_TOKENS] + 3) < 1e-5, "a constant changes no probability"
    assert probe.distance(LOGITS[:1]) < 1e-5, "fewer tokens than stored"
    assert probe.limit(True) == EXACT_LIMIT and probe.limit(False) == LIMIT


def test_distance_equals_mean_log_probability_difference():
    probe = Probe.of(IDS, LOGITS, True)
    other = LOGITS + torch.randn(LOGITS.shape, generator=GENERATOR)
    p, q = LOGITS.double().log_softmax(-1), other.double().log_softmax(-1)
    expected = []
    for position in probe.positions:
        top = p[position].topk(16).indices
        weight = p[position][top].softmax(-1)
        expected.append(float((weight * (p[position] - q[position])[top].abs()).sum()))
    found = probe.distance(other[:NUM_TOKENS])
    assert found == pytest.approx(sum(expected) / len(expected), rel=1e-3)
    assert found > LIMIT


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_logits_have_infinite_distance(value):
    broken = LOGITS[:NUM_TOKENS].clone()
    broken[-1, 3] = value
    assert Probe.of(IDS, LOGITS, True).distance(broken) == float("inf")
    assert Probe.of(IDS, LOGITS, True).distance(LOGITS[:NUM_TOKENS, :40]) == float("inf")


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"version": 9}', '{"version": 1, "probe": {}}']
    + [
        json.dumps({"version": 1, "probe": Probe.of(IDS, LOGITS, True).to_dict() | change})
        for change in ({"positions": [1]}, {"positions": [0, 99] * 4}, {"log_probs": "x"})
    ],
)
def test_damaged_probe_file_is_refused(tmp_path, text):
    (tmp_path / QUALITY).write_text(text)
    with pytest.raises(CheckpointError, match=r"quality.json: cannot be read"):
        read_quality(tmp_path)


def test_folder_without_probe_file(tmp_path):
    assert read_quality(tmp_path) is None
