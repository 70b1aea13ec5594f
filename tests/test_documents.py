"""Targets of links in Markdown exist: files, headings, names in the developer's manual."""

import functools
import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("formats", "qkernels", "calibrate", "qserve", "examples", "tests")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
)
DEVELOPER = ROOT / "qserve" / "docs" / "developer.md"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub derives them from the text."""
    headings = re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    texts = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.strip().replace(" ", "-") for text in texts}


@functools.cache
def sources() -> dict[str, str]:
    """Path from the root -> text, of every Python file."""
    files = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_are_valid(page):
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(linked), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_after_lists_is_rendered_as_code(page):
    """After a list item, four spaces are not enough: the lines would be joined as its text."""
    blocks = re.split(r"\n(?:[ \t]*\n)+", FENCE.sub("", page.read_text()))
    for before, block in itertools.pairwise(blocks):
        item = re.match(r"(?:[-*]|\d+\.) +", before.lstrip("\n"))
        indent = len(block) - len(block.lstrip(" "))
        if item and indent >= 4:
            assert indent >= item.end() + 4, f"{block.splitlines()[0]}: not code"


def test_files_in_developer_manual_exist():
    """A path from the root or from a package, or the end of one."""
    text = DEVELOPER.read_text()
    named = {each for each in CODE.findall(text) if re.fullmatch(r"[\w./]+\.(py|md|sh|txt)", each)}
    assert named
    paths = [str(file.relative_to(ROOT)) for file in [*PAGES, ROOT / "tests/constraints.txt"]]
    paths += [*sources(), "tests/run.sh", "tests/slow_tests.txt"]
    missing = {each for each in named if not any(f"/{path}".endswith(f"/{each}") for path in paths)}
    assert not missing


def test_tables_in_developer_manual_exist():
    """Constants and classes named in the manual exist in the code."""
    text = DEVELOPER.read_text()
    named = set(CODE.findall(text))
    named = {each for each in named if re.fullmatch(r"[A-Z][A-Z_]{2,}|([A-Z][a-z]+){2,}", each)}
    assert named
    code = "\n".join(sources().values())
    assert not {each for each in named if not re.search(rf"\b{each}\b", code)}
