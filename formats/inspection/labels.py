"""Checks of what config.json states about the linears against the linears themselves."""

from collections import Counter, defaultdict
from typing import Any

from formats.errors import InputError
from formats.inspection.findings import Findings
from formats.inspection.linear_summary import LinearSummary
from formats.quant_config import BLOCK, QuantConfig
from formats.rules import FUSED
from formats.scheme import CHANNEL


def check_fused(linears: list[LinearSummary], quant: QuantConfig | None, findings: Findings) -> str:
    """Report members of a fused matrix that differ. Returns the first such matrix, or ""."""
    by_parent: dict[str, dict[str, LinearSummary]] = defaultdict(dict)
    for linear in linears:
        parent, _, local = linear.name.rpartition(".")
        by_parent[parent][local] = linear
    first = ""
    for parent, members_of in by_parent.items():
        for members in FUSED:
            present = {local: members_of[local] for local in members if local in members_of}
            schemes = {local: _fused_scheme(linear) for local, linear in present.items()}
            if len(set(schemes.values())) > 1:
                text = ", ".join(f"{local} {scheme}" for local, scheme in schemes.items())
                # Looked up only for a mismatch: a model may have many experts and a rule for each.
                is_unstated = any(_is_float_unstated(each, quant) for each in present.values())
                findings.error(
                    parent,
                    f"{text}: servers load these as one matrix",
                    "give them one scheme",
                    read_here=not is_unstated,
                )
                first = first or f"{', '.join(present)} of {parent}"
    return first


def _fused_scheme(linear: LinearSummary) -> str:
    """Return the scheme that members share; floats of another dtype are cast into the matrix."""
    return "float" if "float" in linear.traits else linear.scheme


def _is_float_unstated(linear: LinearSummary, quant: QuantConfig | None) -> bool:
    """Return True for a float linear that no readable config states to be float."""
    if "float" not in linear.traits:
        return False
    try:
        return quant is None or quant.scheme_for(linear.name) is not None
    except InputError:
        return True


def _check_act_order(
    linears: list[LinearSummary], quant: QuantConfig | None, block: Any, findings: Findings
) -> None:
    """Report desc_act (act-order) if it is set and groups may have an index."""
    stated = isinstance(block, dict) and block.get("desc_act")
    if quant is None or not stated or all(s.weight.group_size == CHANNEL for s in quant.schemes):
        return
    text = "is true: vLLM refuses it with groups"
    if any("act-order" in linear.traits for linear in linears):
        findings.warning(f"{BLOCK}.desc_act", text, "requantize")
    elif any(linear.traits.isdisjoint({"float"}) for linear in linears):
        findings.warning(
            f"{BLOCK}.desc_act",
            f"{text}, and other readers take a slower path; every group index is in order",
            "set it to false: no weight changes",
        )


def check_labels(
    linears: list[LinearSummary], quant: QuantConfig | None, block: Any, findings: Findings
) -> None:
    """Report labels of the config that contradict the linears."""
    _check_act_order(linears, quant, block, findings)
    for linear in linears:
        if "act-order" in linear.traits and not (quant is not None and quant.act_order):
            leaf = "g_idx" if quant is None or quant.layout == "gptq" else "weight_g_idx"
            findings.error(
                f"{linear.name}.{leaf}",
                "inputs are not grouped in order, and the configuration does not say so: readers"
                " that follow the configuration compute garbage",
                "state desc_act (actorder) if the index is intended, or remove it",
            )
    quantized = [linear for linear in linears if "float" not in linear.traits]
    if quant is None or quant.layout != "gptq" or quant.scheme.weight.symmetric or not quantized:
        return
    if all("symmetric data" in linear.traits for linear in quantized):
        findings.warning(
            f"{BLOCK}.sym",
            "is false, but all zero points are symmetric: vLLM would load it as symmetric",
            "set sym to true",
        )
    else:
        counts = Counter(linear.scheme for linear in quantized)
        findings.warning(
            f"{BLOCK}.sym",
            f"is false ({counts.most_common(1)[0][0]}): vLLM loads only symmetric GPTQ",
            "convert to awq or compressed-tensors",
        )
