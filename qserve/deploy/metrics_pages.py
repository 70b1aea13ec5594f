"""Join the metrics of several servers in one page: a label names the server of each sample."""

from collections.abc import Mapping


def join_pages(pages: Mapping[str, str]) -> str:
    """Join pages in Prometheus' text format (server -> page), with the label `replica`."""
    heads: dict[str, list[str]] = {}  # family -> its comment lines
    samples: dict[str, list[str]] = {}
    for server, page in pages.items():
        family = ""
        for line in page.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, server))
    lines = []
    for family, head in heads.items():
        lines += head + samples.get(family, [])
    return "\n".join(lines) + "\n" if lines else ""


def _labelled(line: str, server: str) -> str:
    label = f'replica="{server}"'
    # A label's value may contain spaces and braces; a name contains neither.
    brace, space = line.find("{"), line.find(" ")
    if 0 <= brace < space:
        return f"{line[: brace + 1]}{label},{line[brace + 1 :]}"
    return f"{line[:space]}{{{label}}}{line[space:]}"
