"""StructuredOutputsParams: one kind, within limits, and nothing that hangs or crashes a library."""

import json
from concurrent.futures import wait

import pytest

from formats.errors import InputError
from qserve.errors import ParameterError
from qserve.params.sampling_params import SamplingParams
from qserve.structured.compiler import GrammarCompiler
from qserve.structured.grammar import check_grammar
from qserve.structured.params import (
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_GRAMMAR_CHARS,
    MAX_SCHEMA_CHARS,
    StructuredOutputsParams,
)


def nested(depth):
    schema = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_dict_is_accepted():
    params = SamplingParams(structured_outputs={"json": {"type": "integer"}, "regex": None})
    assert params.structured_outputs == StructuredOutputsParams(json='{"type": "integer"}')
    assert SamplingParams().structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "found none"),
        ({"regex": "a", "choice": ["a"]}, "found regex, choice"),
        ({"regex": 5}, "expected a text"),
        ({"choice": [5]}, "expected a list of texts"),
        ({"choice": ["a", ""]}, "texts that are not empty"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"at most {MAX_CHOICES}"),
        ({"json": "{"}, "expected a JSON schema"),
        ({"json": "[1]"}, "found list"),
        ({"json": json.dumps({"d": "x" * MAX_SCHEMA_CHARS})}, "characters"),
        ({"json": nested(MAX_DEPTH)}, f"at most {MAX_DEPTH} nested levels"),
        ({"json": {"type": "integer", "multipleOf": 10**9}}, "multipleOf"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "characters"),
        ({"regex": "(" * 1000}, "levels"),
        ({"regex": "a\0"}, "NUL"),
        ({"json_object": 1}, "true or false"),
        ({"backend": "x"}, "no such field"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_params_are_refused(fields, problem):
    with pytest.raises(ParameterError, match=problem):
        check_grammar(SamplingParams(structured_outputs=fields).structured_outputs)


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(["},
        {"regex": "(?=a)b"},
        {"grammar": "start: nowhere"},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"type": "nothing"}},
        {"json": {"type": "string", "pattern": "(["}},
    ],
    ids=str,
)
def test_grammar_error_has_library_reason(fields):
    with pytest.raises(ParameterError, match="cannot be used: .{5}"):
        check_grammar(StructuredOutputsParams(**fields))


def test_compiled_grammars_are_cached(docs_5m):
    compiler = GrammarCompiler(str(docs_5m), 8192, [2])
    first = compiler.submit(StructuredOutputsParams(regex="a+"))
    assert compiler.submit(StructuredOutputsParams(regex="a+")) is first
    one, other = (compiler.constraint(first.result(60)) for _ in range(2))
    one.take(int(tokens_of(one)[0]))
    assert (one.mask([2], True) != other.mask([2], True)).any(), "each has a state of its own"


def test_compile_error_fails_only_its_grammar(docs_5m):
    compiler = GrammarCompiler(str(docs_5m), 8192, [2])
    futures = [compiler.submit(StructuredOutputsParams(regex=each)) for each in ("([", "b+")]
    wait(futures, 60)
    assert isinstance(futures[0].exception(), InputError) and futures[1].exception() is None


def tokens_of(constraint):
    """The tokens that a constraint allows now."""
    words = constraint.mask([], True)
    return [t for t in range(8192) if int(words[t // 64]) >> (t % 64) & 1]


def test_end_tokens_are_allowed_at_valid_ends(docs_5m):
    compiler = GrammarCompiler(str(docs_5m), 8192, [2])
    constraint = compiler.constraint(
        compiler.submit(StructuredOutputsParams(regex="a+")).result(60)
    )

    def ends(may_end):
        return bool(int(constraint.mask([2], may_end)[0]) >> 2 & 1)

    assert not ends(True) and len(constraint.mask([2], True)) == 128
    constraint.take(tokens_of(constraint)[0])
    assert ends(True) and not ends(False), "min_tokens forbids it while something else may follow"
    assert tokens_of(constraint) and not constraint.is_complete
