"""Look-around without look-around: Python's re is the judge of what each pattern matches."""

import random
import re

import pytest

from qserve.structured.pattern_algebra import UnsupportedPattern
from qserve.structured.pattern_rewrite import (
    is_within,
    literals,
    rewrite,
    without_look_around,
)

PATTERNS = [
    *("^(?=.*[0-9])[a-z0-9]{4,}$", "^(?!foo)[a-z]+$", "a(?!b)", "(?!a)b$", "^(?=a)b|c"),
    *("^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$", "^(?:(?!ab)[abc])*$", "^[^\\s](?=.)"),
    *("^(?=.*[a-z])(?=.*[A-Z])(?=.*\\d).{3,8}$", "^(?!.*--)[a-z0-9-]{1,20}(?<!-)$"),
    *("^(?:a|b(?=c))c+$", "^(?!-)[a-z-]{1,63}$", "^(?![0-9]+$)[a-z0-9]+$", "^(?![(])[()a]+$"),
    *("^(?!(?:co|fo|ab)$)[a-z]+$", "^(?=.{3,8}$)[a-z]+(?:-[a-z]+)*$", "^[a-c]+(?<=c)$"),
    *("^(?:(?=a)[ab]{2}){1,2}$", "^[^a-z]*(?=[.])(?<dot>[.])$", "^(?!\\.)[^-]*$"),
]


def in_python(pattern):
    return re.compile(re.sub(r"\\x\{([0-9A-F]+)\}", lambda x: f"\\U{int(x[1], 16):08x}", pattern))


def texts(seed):
    rng = random.Random(seed)
    for _ in range(600):
        yield "".join(rng.choice("aabbc01.-A+'fo()\n ") for _ in range(rng.randint(0, 7)))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_rewritten_pattern_matches_same_texts(pattern):
    original = re.compile(pattern.replace("(?<dot>", "(?P<dot>"))
    rewritten = without_look_around(pattern)
    assert not any("(?=" in each or "(?!" in each or "(?<" in each for each in rewritten)
    parts = [in_python(each) for each in rewritten]
    for text in texts(pattern):
        if not text.endswith("\n"):  # Python's $ matches before a last line break, too
            assert all(part.search(text) for part in parts) == bool(original.search(text)), text


def test_several_patterns_become_one():
    found = in_python(rewrite(("^[a-c]+$", "b"), ("^(?:b|ab)$", "cc")))
    for text in texts(0):
        expected = re.fullmatch("[a-c]+", text) and "b" in text and text not in ("b", "ab")
        assert bool(found.search(text)) == bool(expected and "cc" not in text)
    assert is_within("^a+$", "^[ab]+$") and not is_within("^[ab]+$", "^a+$")
    assert is_within(literals(["a.b", "c"]), "^[a-c.]*$")


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"\bab\b", r"^(?=(a))\1$", "(?<=a)b", "(?i:(?=a))b", "(?=a", "(?=a{1000})b"),
        *("^(?=(?:.*a){40})(?!(?:.*b){40}).*c.{30}$|(?!x)y", "(?!a)" * 300, "^(?=a)b$"),
    ],
)
def test_unsupported_patterns_are_refused(pattern):
    with pytest.raises(UnsupportedPattern):
        rewrite((pattern,))
