"""Joins several pages of metrics in one; a label names the page of each sample."""

from collections.abc import Mapping

PROCESS = "process_"  # how the names of metrics of the whole process begin


def join_pages(pages: Mapping[str, str], label: str, *, of_one_process: bool = False) -> str:
    """Join pages in Prometheus' text format. `pages`: value of `label` -> page.

    Samples that already have the label keep their value. `of_one_process`: all pages are from one
    process, so its own metrics are taken from the first page, without the label.
    """
    heads: dict[str, list[str]] = {}  # metric family -> comment lines
    samples: dict[str, list[str]] = {}
    for value, page in pages.items():
        family = ""
        for line in page.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif line and of_one_process and line.startswith(PROCESS):
                samples.setdefault(family, [line])
            elif line:
                samples.setdefault(family, []).append(_labelled(line, label, value))
    lines = []
    for family, head in heads.items():
        lines += head + samples.get(family, [])
    return "\n".join(lines) + "\n" if lines else ""


def _labelled(line: str, label: str, value: str) -> str:
    # Label values may contain spaces and braces; metric names contain neither.
    brace, space = line.find("{"), line.find(" ")
    has_labels = 0 <= brace < space
    if has_labels and any(f'{before}{label}="' in line for before in "{,"):
        return line
    quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    added = f'{label}="{quoted}"'
    if has_labels:
        return f"{line[: brace + 1]}{added},{line[brace + 1 :]}"
    return f"{line[:space]}{{{added}}}{line[space:]}"
