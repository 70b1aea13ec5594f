"""What the machine code of an asynchronous product shows: which registers it reads, and when.

A product whose left operand is in registers goes on reading them after the instruction. A program
that writes them before it has waited is wrong, compiles, and is right on most runs.
"""

import re

Instruction = tuple[int, str]  # its address, its text


def instructions(sass: str) -> list[Instruction]:
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)
    return [(int(address, 16), text.strip()) for address, text in found]


def overwritten_in_flight(sass: str) -> list[str]:
    """Instructions of the loop around the products that write what a product may still read.

    Knows loops in which each group of products is waited for once the next group has begun.
    """
    code = instructions(sass)
    groups = _groups(code)
    start, end = _loop(code, groups)
    waits = [i for i in range(start, end) if "DEPBAR.LE gsb0, 0x1" in code[i][1]]
    assert len(waits) == len(groups), f"{len(groups)} groups of products, {len(waits)} waits"
    found = []
    for number, group in enumerate(groups):
        reads = {register for _, first in group for register in range(first, first + 4)}
        issued = group[-1][0]
        if number + 1 < len(groups):
            turn = range(issued, waits[number + 1])
        else:
            turn = (*range(issued, end), *range(start, waits[0]))
        found += [code[i][1] for i in turn if reads & _written(code[i][1])]
        for i, first in group:
            one = set(range(first, first + 4))
            found += [code[j][1] for j in range(i + 1, issued) if one & _written(code[j][1])]
    return found


def _groups(code: list[Instruction]) -> list[list[tuple[int, int]]]:
    """Of each group of products: (index of the instruction, first register of the left operand)."""
    groups, group = [], []
    for i, (_, text) in enumerate(code):
        match = re.search(r"HGMMA\S+ R\d+, R(\d+),", text)
        if match:
            group.append((i, int(match.group(1))))
            if "gsb0" in text:
                groups.append(group)
                group = []
    return groups


def _loop(code: list[Instruction], groups: list[list[tuple[int, int]]]) -> tuple[int, int]:
    """Indices of the first instruction of the loop, and of the branch back to it."""
    first, last = groups[0][0][0], groups[-1][-1][0]
    addresses = {address: i for i, (address, _) in enumerate(code)}
    for i in range(last, len(code)):
        match = re.search(r"BRA 0x([0-9a-f]+)", code[i][1])
        if match and int(match.group(1), 16) < code[first][0]:
            return addresses[int(match.group(1), 16)], i
    raise AssertionError("the products are in no loop")


def _written(text: str) -> set[int]:
    """The registers that an instruction writes, as far as the first one that it names."""
    text = re.sub(r"^@!?U?P\w+\s+", "", text)
    match = re.match(r"(\S+)\s+(?:P[0-9T]+, )*R(\d+)\b", text)
    if match is None or match.group(1).startswith(("ST", "HGMMA", "SYNCS", "R2UR")):
        return set()
    name, first = match.group(1), int(match.group(2))
    width = 4 if ".128" in name else 2 if any(k in name for k in (".64", "WIDE", "CS2R")) else 1
    return set(range(first, first + width))
