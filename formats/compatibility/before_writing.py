"""Programs that will load a folder, from its config and shapes, before it is written."""

from collections.abc import Mapping, Sequence

from formats.checkpoint import CheckpointReader
from formats.compatibility.loads_in import Facts, Verdict
from formats.compatibility.rules import OTHERS, loads_in
from formats.errors import InputError
from formats.inspection.config import check_config
from formats.inspection.findings import Findings
from formats.inspection.labels import check_fused
from formats.inspection.linear_summary import LinearSummary
from formats.layouts import LAYOUTS, Layout, check_writable
from formats.quant_config import QuantConfig
from formats.scheme import Scheme


def verdicts_of(
    config: QuantConfig, schemes: Mapping[str, Scheme | None], reader: CheckpointReader
) -> tuple[list[Verdict], Findings]:
    """Return which programs will load the folder, before it is written, and its problems."""
    linears = [
        LinearSummary(
            name=name,
            out_features=reader.entries[f"{name}.weight"].shape[0],
            in_features=reader.entries[f"{name}.weight"].shape[1],
            scheme=str(own),
            num_bytes=0,
            traits=frozenset() if own is not None else frozenset({"float"}),
        )
        for name, own in schemes.items()
    ]
    findings, names = Findings(), reader.config.get("architectures")
    whole = reader.whole_config.get("architectures")
    choices = check_config(reader.config, findings)
    fused_mixed = check_fused(linears, config, findings)
    errors = [p for p in findings.problems if p.severity == "error" and not p.read_here]
    facts = Facts(
        architecture=names[0] if isinstance(names, list) and len(names) == 1 else "",
        whole=whole[0] if isinstance(whole, list) and len(whole) == 1 else "",
        method=config.method,
        config=config,
        config_error="",
        linears=linears,
        choices=choices,
        first_error=next((f"{e.subject}: {e.text}" for e in errors), ""),
        fused_mixed=fused_mixed,
        unplaced="",
        desc_act=False,
        written_by_gptqmodel=False,
        exceptions=bool(config.to_dict().get("dynamic")),
    )
    return loads_in(facts), findings


def check_readers(
    readers: Sequence[str],
    verdicts: Sequence[Verdict],
    findings: Findings,
    layout: Layout,
    schemes: Mapping[str, Scheme | None],
    reader: CheckpointReader,
) -> None:
    """Raise InputError if a named reader would not load the folder."""
    known = {verdict.program: verdict for verdict in verdicts}
    if isinstance(readers, str):
        raise InputError("readers", f"expected a list of names, found {readers!r}", "use [name]")
    for program in readers:
        if program not in known:
            raise InputError(
                f"reader {program!r}", "unknown", f"known: {', '.join(known)}, or none of them"
            )
        if known[program].answer != "no":
            continue
        able = []
        for other in LAYOUTS.values():
            try:
                for own in set(schemes.values()) - {None}:
                    check_writable(other, own)
                found, _ = verdicts_of(QuantConfig.of_modules(other.name, schemes), schemes, reader)
            except InputError:
                continue
            if all(v.answer != "no" for v in found if v.program in readers):
                able.append(other.name)
        named = [p for p in OTHERS if p in readers]
        errors = [p for p in findings.problems if p.severity == "error"]
        if errors and not able:  # such as linears that servers fuse, in several schemes
            raise InputError(errors[0].subject, errors[0].text, errors[0].remedy)
        remedy = f"no format is loaded by {', '.join(named)}: give other readers=(...)"
        if able:
            remedy = f"write format={able[0]!r}"
        raise InputError(f"format {layout.name!r}", f"{program} {known[program].reason}", remedy)
