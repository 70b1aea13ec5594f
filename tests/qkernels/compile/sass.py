"""Find out from machine code which registers an asynchronous product reads, and when.

A product whose left operand is in registers reads them after the instruction was issued, too. A
program that writes them before it has waited compiles and is right in most runs, but is wrong.
"""

import re

Instruction = tuple[int, str]  # its address, its text


def instructions(sass: str) -> list[Instruction]:
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)
    return [(int(address, 16), text.strip()) for address, text in found]


def product_loops(sass: str) -> list[list[str]]:
    """The instructions of each innermost loop around warpgroup products of any type."""
    code = instructions(sass)
    return [[text for _, text in code[a : b + 1]] for a, b in _loops(code)]


def overlapped(sass: str) -> bool:
    """Return True if every loop with products waits for one only after the next was issued."""
    code = instructions(sass)
    loops = _loops(code)
    later = re.compile(r"DEPBAR\.LE gsb0, 0x[1-9]")
    waits = [any(later.search(text) for _, text in code[a:b]) for a, b in loops]
    return bool(loops) and all(waits)


def overwritten_in_flight(sass: str) -> list[str]:
    """Instructions that write what a product may still read.

    Follows the code from top to bottom, and each innermost loop around products twice: a product
    may be in flight over its end.
    """
    code = instructions(sass)
    ends = {end: start for start, end in _loops(code)}
    groups: list[set[int]] = []  # registers that issued groups of products read, oldest first
    group: set[int] = set()  # of the group that is being issued
    found, repeated, i = [], set(), 0
    while i < len(code):
        text = code[i][1]
        product = re.search(r"[HIQ]GMMA\S+ R\d+, R(\d+),", text)
        wait = re.search(r"DEPBAR\.LE gsb0, 0x([0-9a-f]+)", text)
        if product:
            first = int(product.group(1))
            group |= set(range(first, first + 4))
            if "gsb0" in text:
                groups.append(group)
                group = set()
        elif wait:
            groups = groups[max(0, len(groups) - int(wait.group(1), 16)) :]
        elif _written(text) & group.union(*groups):
            found.append(text)
        if i in ends and i not in repeated:
            repeated.add(i)
            i = ends[i]
        else:
            i += 1
    return found


def _loops(code: list[Instruction], product: str = "GMMA") -> list[tuple[int, int]]:
    """Indices of the first instruction and the branch back, of innermost loops with products."""
    index = {address: i for i, (address, _) in enumerate(code)}
    loops = []
    for i, (address, text) in enumerate(code):
        branch = re.match(r"@!?U?P\d BRA(?:\.\w+)? 0x([0-9a-f]+)$", text)
        if branch and int(branch.group(1), 16) < address:
            loops.append((index[int(branch.group(1), 16)], i))
    return [
        (a, b)
        for a, b in loops
        if any(product in text for _, text in code[a : b + 1])
        and not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)
    ]


def _written(text: str) -> set[int]:
    """The registers that an instruction writes, as far as the first one that it names."""
    text = re.sub(r"^@!?U?P\w+\s+", "", text)
    match = re.match(r"(\S+)\s+(?:P[0-9T]+, )*R(\d+)\b", text)
    if match is None or re.match("ST|[HIQ]GMMA|SYNCS|R2UR", match.group(1)):
        return set()
    name, first = match.group(1), int(match.group(2))
    width = 4 if ".128" in name else 2 if any(k in name for k in (".64", "WIDE", "CS2R")) else 1
    return set(range(first, first + width))
