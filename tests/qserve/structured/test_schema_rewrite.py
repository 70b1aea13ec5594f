"""Keywords that llguidance lacks: 63 schemas of eight kinds, with jsonschema as the judge."""

import functools
import json
import random
from datetime import datetime

import jsonschema
import numpy as np
import pytest

from qserve.errors import ParameterError
from qserve.structured import schema_facts
from qserve.structured.backend import library, limits
from qserve.structured.grammar import check_grammar, grammar_text, unenforced
from qserve.structured.params import StructuredOutputsParams
from qserve.structured.schema_rewrite import enforceable

A, INT, TEXT = {"const": "a"}, {"type": "integer"}, {"type": "string"}
ABC = {"enum": ["a", "b", "c"]}


def of(properties, required=(), **more):
    """A closed object."""
    fields = {"type": "object", "properties": properties, "additionalProperties": False}
    return fields | {"required": list(required)} | more


def items(form, **more):
    return {"type": "array", "items": form} | more


def when(condition, then, otherwise=True):
    return {"if": condition, "then": then, "else": otherwise}


def text(pattern, **more):
    return {"type": "string", "pattern": pattern} | more


def maps(names, value=INT, **more):
    return {"type": "object", "propertyNames": names, "additionalProperties": value} | more


KIND = {"kind": {"enum": ["a", "b", "c"]}, "x": INT, "y": INT}
IS_A = {"properties": {"kind": A}, "required": ["kind"]}
PETS = [
    {"kind": "a"}, {"kind": "a", "x": 1}, {"kind": "b"}, {"kind": "b", "y": 1},
    {"kind": "c"}, {"kind": "a", "x": 1, "y": 2}, {"x": 1}, {},
]  # fmt: skip
LISTS = [[], ["a"], ["b", "a"], ["a", "a"], ["a", "b", "c"], ["c", "b", "c"]]
NUMBERS = [[], [1], [2, 1], [1, 1], [3, 3, 1], [2, 3], [1, 2, 1, 1]]
XYZ = [
    {},
    {"x": 1},
    {"y": 2},
    {"x": 1, "y": 2},
    {"x": 1, "y": 2, "z": 3},
    {"z": 3},
    {"y": 2, "z": 3},
]
ABOUT_XYZ = {"x": INT, "y": INT, "z": INT}
MAPS = [{}, {"a": 1}, {"ab": 1}, {"b": 1, "a": 2}, {"A": 1}, {"a1": 1}, {"abcd": 5}, {"a": "x"}]
ANY = ["a", "b", "", 1, 2, 1.5, True, None, [], {}]
WORDS = ["", "a", "ab", "a1", "1", "A1b", "foo", "foobar", "a-b", "-a", "a--b", "a-", "Abc12345"]
DAYS = [
    "0000-01-01",
    "0001-01-01",
    "2023-02-29",
    "2024-02-29",
    "1900-02-29",
    "2000-02-29",
    "2024-1-1",
]
EMAILS = ["a.b@c.de", "a@b", f"{'a' * 64}@b.co", "a..b@c.de", ".a@c.de", "a@b_c.de"]

# kind: (schema, values of which the judge says whether they are right)
KINDS = {
    "unique items": [
        (items(ABC, uniqueItems=True), LISTS),
        (items(ABC, uniqueItems=True, minItems=1, maxItems=2), LISTS),
        (items({"type": "boolean"}, uniqueItems=True), [[], [True], [True, False], [True, True]]),
        (items({"type": "integer", "minimum": 1, "maximum": 3}, uniqueItems=True), NUMBERS),
        (items(TEXT, uniqueItems=True, maxItems=1), [*LISTS[:2], ["b", "a"]]),
        (of({"tags": items(ABC, uniqueItems=True)}, ["tags"]), [{"tags": each} for each in LISTS]),
        (items({"enum": [1, 1.0, True, "1"]}, uniqueItems=True), [[1], [1, True], [1, 1]]),
    ],
    "contains": [
        (items(INT, contains={"const": 1}), NUMBERS),
        (items(INT, contains={"minimum": 3}), NUMBERS),
        (items(INT, contains={"const": 1}, minContains=2), NUMBERS),
        (items(INT, contains={"const": 1}, maxContains=1), NUMBERS),
        (items(INT, contains={"const": 1}, minContains=0, maxContains=1), NUMBERS),
        (items(ABC, contains=A, maxItems=2), LISTS),
        (items(ABC, contains={"enum": ["a", "b"]}, minItems=2), LISTS),
        (items(of({"k": ABC}, ["k"]), contains={"properties": {"k": A}}),
         [[], [{"k": "a"}], [{"k": "b"}]]),
    ],
    "conditions": [
        (of(KIND, **when(IS_A, {"required": ["x"]})), PETS),
        (of(KIND, **when(IS_A, {"required": ["x"]}, {"required": ["y"]})), PETS),
        (of(KIND, ["kind"], **when({"properties": {"kind": A}}, {"required": ["x"]})), PETS),
        (of(KIND, ["kind"], **when(IS_A, {"properties": {"y": False}})), PETS),
        (of(KIND, **when({"required": ["x"]}, {"required": ["y"]})), PETS),
        (
            of(KIND, ["kind"], allOf=[
                when({"properties": {"kind": {"const": each}}}, {"required": [name]})
                for each, name in (("a", "x"), ("b", "y"))
            ]),
            PETS,
        ),
        (
            of(KIND, allOf=[
                {"if": {"properties": {"kind": {"const": each}}}, "then": {"required": [name]}}
                for each, name in (("a", "x"), ("b", "y"))
            ]),
            PETS,
        ),
        (when({"type": "string"}, {"enum": ["a"]}, {"type": "integer"}), ANY),
        (INT | when({"minimum": 10}, {"maximum": 20}, {"enum": [1, 2]}), [1, 2, 3, 10, 20, 21]),
    ],
    "dependents": [
        (of(ABOUT_XYZ, dependentRequired={"x": ["y"]}), XYZ),
        (of(ABOUT_XYZ, dependentRequired={"x": ["y", "z"], "z": ["y"]}), XYZ),
        (of(ABOUT_XYZ, ["x"], dependentRequired={"x": ["z"]}), XYZ),
        (of(ABOUT_XYZ, dependentSchemas={"x": {"required": ["y"]}}), XYZ),
        (of(ABOUT_XYZ, dependentSchemas={"z": {"properties": {"x": False}}}), XYZ),
        (of(ABOUT_XYZ, dependentSchemas={"z": False}), XYZ),
        ({"$schema": "http://json-schema.org/draft-07/schema#"}
         | of(ABOUT_XYZ, dependencies={"x": ["y"], "z": {"required": ["x"]}}), XYZ),
    ],
    "names": [
        (maps({"pattern": "^[a-z]+$"}), MAPS),
        (maps(ABC), [{}, {"a": 1}, {"a": 1, "b": 2}, {"d": 1}, {"a": "x"}]),
        (maps(ABC, required=["a"]), [{}, {"a": 1}, {"b": 1}, {"a": 1, "c": 1}]),
        (maps({"minLength": 2, "maxLength": 3}), MAPS),
        (maps({"not": {"enum": ["a"]}}), MAPS),
        (maps({"pattern": "^(?!a)"}, TEXT), [{"a": "x"}, {"b": "x"}, {"b": 1}]),
        (maps({"pattern": "^[a-z]+$"}, INT, properties={"id": TEXT}, required=["id"]),
         [{"id": "x"}, {"id": "x", "a": 1}, {"id": "x", "A": 1}, {"id": 1}, {"a": 1}]),
    ],
    "not": [
        ({"not": {"type": "string"}}, ANY[:5] + ANY[6:]),
        ({"not": {"enum": ["a", 1, None]}}, ANY),
        (TEXT | {"not": {"const": ""}}, ["", "a", "ab"]),
        (TEXT | {"maxLength": 3, "not": {"pattern": "^a"}}, ["", "a", "ba", "aa"]),
        (ABC | {"not": {"const": "b"}}, ["a", "b", "c"]),
        (INT | {"not": {"enum": [1, 3]}}, [0, 1, 2, 3, 4]),
        (INT | {"not": {"minimum": 5}}, [4, 5, 6, -1]),
        (of(ABOUT_XYZ, **{"not": {"required": ["x", "y"]}}), XYZ),
        (of(ABOUT_XYZ, **{"not": {"anyOf": [{"required": ["x"]}, {"required": ["z"]}]}}), XYZ),
        (items(INT, **{"not": {"items": {"const": 1}}}), NUMBERS),
    ],
    "look-around": [
        (text("^(?=.*[0-9])[a-z0-9]{2,}$"), WORDS),
        (text("^(?!foo)[a-z]+$"), WORDS),
        (text("^(?!.*--)[a-z-]+(?<!-)$"), WORDS),
        (text("^(?=.*[a-z])(?=.*[A-Z])(?=.*\\d).{8,16}$"), WORDS),
        (text("^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"), ["", "1", "-", "+1.5", ".", "-.5", "1.2.3"]),
        (text("^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@"
              "([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$", format="email"), EMAILS),
    ],
    "counts and formats": [
        (of(ABOUT_XYZ, minProperties=2), XYZ),
        (of(ABOUT_XYZ, ["x"], maxProperties=2), XYZ),
        ({"type": "object", "properties": {"x": INT}, "required": ["y"],
          "patternProperties": {"y": INT}, "maxProperties": 1}, [*XYZ, {"y": "1"}]),
        ({"type": "object", "properties": {"x": INT}, "required": ["y"],
          "additionalProperties": INT, "maxProperties": 2}, [*XYZ[:4], {"y": "1"}]),
        ({"type": "object", "minProperties": 1, "additionalProperties": INT},
         [{}, {"a": 1}, {"a": "x"}]),
        ({"type": "string", "format": "date"}, DAYS),
        (TEXT | {"format": "date-time"}, [f"{day}T01:02:03Z" for day in DAYS]),
        (TEXT | {"format": "email"}, ["a.b@c.de", "a.de", "o'x@c-d.de"]),
        ({"oneOf": [of({"k": {"const": each}, each: INT}, ["k"]) for each in "ab"]},
         [{"k": "a"}, {"k": "b", "b": 1}, {"k": "a", "b": 1}, {"k": "c"}]),
    ],
}  # fmt: skip
SCHEMAS = [
    pytest.param(schema, values, id=f"{kind} {number}")
    for kind, cases in KINDS.items()
    for number, (schema, values) in enumerate(cases)
]


CHECKER = jsonschema.FormatChecker()


@CHECKER.checks("date-time", raises=ValueError)
def is_moment(value):
    return bool(datetime.fromisoformat(value))


@functools.cache
def tokenizer():
    return library().LLTokenizer("byte")


def matcher(schema=None, **params):
    grammar = grammar_text(StructuredOutputsParams(json=schema, **params))
    found = library().LLMatcher(tokenizer(), grammar, limits=limits())
    assert not found.is_error(), found.get_error()
    return found


def accepts(start, value):
    """True if a matcher takes a value's JSON, from its start to its end."""
    tokens = list(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())
    copy = start.deep_copy()
    return copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()


def judge(schema):
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return kind(schema, format_checker=CHECKER)


def walk(start, rng, longest=300):
    """The JSON of random allowed bytes; None where it came to no end."""
    at, written = start.deep_copy(), bytearray()
    words = np.empty(9, np.int32)
    while not at.is_stopped() and len(written) < longest:
        if at.is_accepting():
            return bytes(written)
        at.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:128]
        allowed = np.flatnonzero(bits).tolist()
        ends = [token for token in allowed if token in b'"}]']
        token = rng.choice(ends if ends and rng.random() < 0.4 else allowed)
        assert at.consume_token(token)
        written.append(token)
    return bytes(written) if at.is_accepting() else None


def test_schema_list_has_63_schemas_of_eight_kinds():
    assert (len(KINDS), len(SCHEMAS)) == (8, 63)


@pytest.mark.parametrize(("schema", "values"), SCHEMAS)
def test_grammar_agrees_with_jsonschema(schema, values):
    params = StructuredOutputsParams(json=schema)
    check_grammar(params)
    assert not unenforced(params)
    validator, start = judge(schema), matcher(schema)
    expected = {json.dumps(value): validator.is_valid(value) for value in values}
    assert {True, False} == {*expected.values()}
    assert {json.dumps(value): accepts(start, value) for value in values} == expected


@pytest.mark.parametrize(("schema", "values"), SCHEMAS)
def test_random_texts_of_a_grammar_are_valid(schema, values):
    validator, start, rng = judge(schema), matcher(schema), random.Random(0)
    found = [each for each in (walk(start, rng) for _ in range(5)) if each is not None]
    assert found
    for written in found:
        value = json.loads(written)
        validator.validate(value)


@pytest.mark.parametrize(
    ("schema", "right", "too_long"),
    [
        ({"type": "number"}, ["0.5", "-12", "999999999999999"], ["1" * 17, "0." + "1" * 10]),
        ({"type": "number", "minimum": 0}, ["0", "3.25"], ["1" * 17, "0." + "0" * 10]),
        ({"type": ["integer", "null"]}, ["-5", "null", "9" * 18], ["9" * 19, "-" + "9" * 19]),
        (
            {"type": "string", "format": "duration"},
            ['"P1Y2M3DT4H5M6S"', '"PT36H"', '"P2W"'],
            [f'"P{"1" * 10}D"', f'"PT{"1" * 10}S"'],
        ),
        (
            {"type": "string", "format": "email"},
            [f'"{"a" * 64}@b.co"'],
            [f'"{"a" * 65}@b.co"', f'"a@{"b" * 64}.co"'],
        ),
        ({"type": "string", "format": "time"}, ['"01:02:03.5Z"'], [f'"01:02:03.{"1" * 10}Z"']),
    ],
)
def test_every_value_can_end(schema, right, too_long):
    start = matcher(schema)
    for written in (*right, *too_long):
        tokens, copy = list(written.encode()), start.deep_copy()
        is_whole = copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()
        assert is_whole == (written in right), written


def whole(low, high):
    return {"type": "integer", "minimum": low, "maximum": high}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (whole(-(2**63), 2**63 - 1), ["-8999999999999999999", "0", "9" * 18], ["1" * 20, "0.5"]),
        (whole(0, 2**256 - 1), ["0", "8" * 19], ["-1", "1" * 79]),
        ({"type": "integer", "exclusiveMinimum": -1e300}, ["-1", "7"], ["1" * 19, "0.5"]),
        (whole(-3, 10**30) | {"exclusiveMaximum": 5}, ["-3", "4"], ["5", "-4"]),
        (whole(-(10**30), 5) | {"exclusiveMinimum": -4}, ["-3", "5"], ["6", "-4"]),
        ({"type": "number", "minimum": 0, "maximum": 1.7e308}, ["0", "2.5", "8" * 18], ["-1"]),
    ],
)
def test_bounds_beyond_64_bits_are_narrowed(schema, right, wrong):
    """llguidance refuses the bounds of int64, and of floats beyond it."""
    start = matcher(schema)
    assert {each: accepts(start, json.loads(each)) for each in (*right, *wrong)} == (
        dict.fromkeys(right, True) | dict.fromkeys(wrong, False)
    )


LEFT_OUT = {
    "uniqueItems": items(INT, uniqueItems=True),
    "pattern": text(r"^(a|b)\1$"),
    "format": TEXT | {"format": "idn-email"},
    "oneOf": {"oneOf": [{"type": "number"}, INT]},
    "minProperties": {"type": "object", "minProperties": 2},
    "not": {"not": {"additionalProperties": INT}},
    "contains": {"type": "array", "prefixItems": [INT], "contains": A},
    "if": of(KIND, **when({"additionalProperties": INT}, {"required": ["x"]})),
}


@pytest.mark.parametrize("keyword", LEFT_OUT)
def test_unenforceable_keyword_is_reported(keyword):
    params = StructuredOutputsParams(json=of({"v": LEFT_OUT[keyword]}))
    check_grammar(params)
    (warning,) = unenforced(params)
    assert warning.startswith(f"{keyword} at #/properties/v is not enforced (")


def test_not_that_contains_itself_is_refused():
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    params = StructuredOutputsParams(
        json={"$defs": {"node": node}, "not": {"$ref": "#/$defs/node"}}
    )
    with pytest.raises(ParameterError, match="#/\\$defs/node contains itself"):
        check_grammar(params)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}, INT]},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
        {"$ref": "#/x/a", "x": {"a": {"allOf": [INT, {"$ref": "#/x/b"}]}, "b": {"$ref": "#/x/a"}}},
        {"type": "array", "items": {"$ref": "#/$defs/a"},
         "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [INT, {"$ref": "#/$defs/a"}]}}},
    ],
)  # fmt: skip
def test_references_in_a_circle_are_refused(schema):
    """llguidance panics when such a schema is compiled, not when it is checked."""
    with pytest.raises(ParameterError, match="cannot be used: \\$ref '#.*' leads back to itself"):
        check_grammar(StructuredOutputsParams(json=schema))


def test_long_chains_of_references_are_followed_once(monkeypatch):
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)} | {"d3000": INT}
    followed, lookup = [], schema_facts.lookup
    monkeypatch.setattr(schema_facts, "lookup", lambda *of: followed.append(1) or lookup(*of))
    checked = set()
    for _ in range(5):
        schema_facts.check_references({"$ref": "#/$defs/d0"}, {"$defs": chain}, checked)
    assert len(followed) <= 3000 + 5


def test_references_that_pass_through_a_value_are_allowed():
    tree = {"type": "array", "items": {"allOf": [{"$ref": "#/$defs/tree"}]}, "maxItems": 1}
    schema = {"$defs": {"tree": tree}, "allOf": [{"$ref": "#/$defs/tree"}]}
    check_grammar(StructuredOutputsParams(json=schema))
    assert accepts(matcher(schema), [[[]]]) and not accepts(matcher(schema), [[], []])


def test_reference_to_an_anchor_is_not_the_root():
    one = {"$defs": {"one": {"$anchor": "one", "const": 1}}, "not": {"$ref": "#one"}}
    params = StructuredOutputsParams(json=INT | one)
    check_grammar(params)
    (warning,) = unenforced(params)
    assert warning.startswith("not at # is not enforced (a reference to another document or to an")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": 5, "minProperties": 2, "properties": {"a": 1}},
        {"allOf": {"a": 1}},
        {"if": {"properties": []}, "then": False},
        {"dependentRequired": {"a": 5}},
        {"$ref": "#/a", "not": {"$ref": "#/nowhere"}},
        {"type": "array", "contains": {}, "minContains": "x"},
        {"type": 5, "uniqueItems": True, "items": {"enum": 5}},
    ],
)
def test_malformed_schema_is_a_client_error(schema):
    try:
        check_grammar(StructuredOutputsParams(json=schema))
    except ParameterError as error:
        assert "cannot be used" in str(error)


@pytest.mark.exhaustive
def test_rewriting_many_conditions_is_bounded():
    conditions = [when({"required": [f"p{i}"]}, {"required": [f"q{i}"]}) for i in range(40)]
    params = StructuredOutputsParams(json={"type": "object", "allOf": conditions})
    check_grammar(params)
    (warning,) = unenforced(params)
    assert warning == "a condition at # is not enforced (too many combinations)"


def test_nested_arrays_are_rewritten_once():
    """`items` may be a schema or a list; reading it as both doubled the work of each level."""
    form, depth = of({"a": INT}, ["a"], minProperties=1), 40
    for _ in range(depth):
        form = items(form, minItems=1, maxItems=1)
    rewritten, warnings = enforceable(json.dumps(form))
    assert not warnings
    found, levels = json.loads(rewritten), 0
    while found["type"] == "array":
        found, levels = found["items"], levels + 1
    assert levels == depth and list(found["properties"]) == ["a"]
    check_grammar(StructuredOutputsParams(json=form))
