"""Patterns of strangers: the same answers as Python's re, and never long to wait for."""

import random
import re

import pytest

from formats.errors import CheckpointError
from formats.patterns import Regex
from tests.formats.limits import cpu_seconds

NAMES = [
    "model.layers.12.mlp.down_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.3.self_attn.qkv_proj",
    "lm_head",
    "aab",
    "bbbc",
    "a b\n",
    "",
]
PATTERNS = [
    r".*mlp.*",
    r"model\.layers\.\d+\.(mlp|self_attn)\.(q|k|down)_proj$",
    r"(?!.*mlp).*proj",
    r"^(?:(?!self_attn).)*$",
    r"(?=model)m\w+",
    r".*\.layers\.(?:1|12)\.",
    r"(a|aa)*b$",
    r"[^a-c]+\b",
    r"a??b{2,3}c|",
    r"(?:.*){2,3}x",
    r"\S+\s\S",
    r"lm_head|\Alm",
    r".*\Bproj",
    r"b{,2}c?$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_matches_equal_re(pattern):
    for name in NAMES:
        if name.endswith("\n"):
            continue  # re's $ also fits before a last line break
        assert Regex(pattern).matches(name) == bool(re.match(pattern, name)), name


def test_random_pattern_matches_equal_re():
    generator = random.Random(3)
    pieces = ["a", "b", ".", "[ab]", "(a|b)", "(?:ab)", "(?!b)", "(?=a)", "^", "$"]
    for _ in range(500):
        pattern = "".join(
            generator.choice(pieces) + generator.choice(["", "", "*", "+", "?", "{1,2}"])
            for _ in range(generator.randrange(1, 5))
        )
        try:
            expected = re.compile(pattern)
        except re.error:
            continue
        ours = Regex(pattern)
        for _ in range(6):
            name = "".join(generator.choice("abc") for _ in range(generator.randrange(6)))
            assert ours.matches(name) == bool(expected.match(name)), (pattern, name)


@pytest.mark.parametrize(
    "pattern", [r"(a+)+$", r"(a|a)*b", r"((a*)*)*c", r"(a|aa|aaa)+$", "(.*.*)*x"]
)
def test_backtracking_patterns_are_fast(pattern):
    with cpu_seconds(2):
        assert not Regex(pattern).matches("a" * 60 + "!")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "not a regular expression"),
        (r"(a)\1", "not supported"),
        ("(?<=a)b", "looks behind"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        ("a{5000}", "repeats more than 1000"),
        ("a{999999999999}", "not a regular expression"),
        ("(" * 60 + ")" * 60, "nested too deeply"),
        ("a" * 3000, "longer than"),
        ("(?P<x>a)(?(x)b|c)", "not supported"),
    ],
)
def test_unsupported_pattern_syntax_is_refused(pattern, reason):
    with pytest.raises(CheckpointError, match=reason):
        Regex(pattern)


def test_match_step_limit_is_enforced():
    with pytest.raises(CheckpointError, match="too long"):
        Regex("(?:(?!.*x).)*$").matches("a" * 400)
