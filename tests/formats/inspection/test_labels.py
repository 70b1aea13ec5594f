"""Checks of a config against the linears, for models with many experts."""

import pytest

from formats.inspection.findings import Findings
from formats.inspection.labels import check_fused
from formats.inspection.linear_summary import LinearSummary
from formats.quant_config import QuantConfig
from formats.rules import Rule
from formats.scheme import Scheme

LEAVES = ("gate_proj", "up_proj", "down_proj")


def linears(num_experts, mixed=()):
    """Experts in float. `mixed`: those whose gate_proj is quantized."""
    quantized = {(expert, "gate_proj") for expert in mixed}
    return [
        LinearSummary(
            name=f"model.layers.0.mlp.experts.{expert}.{leaf}",
            out_features=8,
            in_features=8,
            scheme="w4a16-g128-sym",
            num_bytes=0,
            traits=frozenset() if (expert, leaf) in quantized else frozenset({"float"}),
        )
        for expert in range(num_experts)
        for leaf in LEAVES
    ]


@pytest.mark.parametrize("mixed", [(), (3, 200)])
def test_expert_rules_are_matched_only_for_mixed_matrices(mixed, monkeypatch):
    """The number of matches grows with the experts, not with experts times rules."""
    tried = []
    matches = Rule.matches

    def count(self, module):
        tried.append(module)
        return matches(self, module)

    monkeypatch.setattr(Rule, "matches", count)
    num_experts = 256
    rules = [
        Rule(kind="name", text=linear.name, scheme=None) for linear in linears(num_experts, mixed)
    ]
    config = QuantConfig(scheme=Scheme.parse("w4a16-sym"), rules=tuple(rules))
    findings = Findings()
    first = check_fused(linears(num_experts, mixed), config, findings)
    assert [each.read_here for each in findings.problems] == [True] * len(mixed)
    names_of_one = 8  # of the linear and of its fused matrix, by this and other tools' names
    assert len(tried) <= len(mixed) * 2 * len(rules) * names_of_one
    assert first == ("gate_proj, up_proj of model.layers.0.mlp.experts.3" if mixed else "")
