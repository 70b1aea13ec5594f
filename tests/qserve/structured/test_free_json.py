"""Free values, with and without a schema around them: their numbers have a limited length."""

import json

import pytest

from qserve.structured.grammar import check_grammar
from qserve.structured.params import StructuredOutputsParams
from tests.qserve.structured.test_schema_rewrite import accepts, judge, matcher

FREE_JSON = [  # a text, and whether free JSON may be it
    *((each, True) for each in ("{}", '{"a": [ ], "b":{ "c" : [1, -0.5, 6.02e23, null]}}')),
    *((each, True) for each in ('{"a":\n  "x\\n\\u001f\\"é😀",\n"b": [true , false]}',)),
    *(('{"a": ' + each + "}", True) for each in ("9" * 18, "0.30000000000000004", "-1E-09")),
    *(('{"a": ' + each + "}", False) for each in ("9" * 19, "0." + "1" * 18, "1e" + "1" * 3)),
    *((each, False) for each in ('{"a": 01}', '{"a": .5}', '{"a":   1}', '{"a": "\\ud800"}')),
    *((each, False) for each in ("{,}", '{"a": 1,}', "{a: 1}", '{"a"}', "[1,]", "{}}")),
]


TAG = {"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}]}
FREE = {
    "json_object": {"json_object": True},
    "any object": {"schema": {"type": "object", "properties": {}, "title": "Any"}},
    "any value": {"schema": {}},
    "structural tag": {"structural_tag": TAG | {"triggers": ["<a>"]}},
}


@pytest.mark.parametrize("kind", FREE)
def test_free_json_has_numbers_of_limited_length(kind):
    start = matcher(**FREE[kind])
    begin, end = ("<a>", "</a>") if kind == "structural tag" else ("", "")
    for written, is_right in FREE_JSON:
        tokens, copy = list(f"{begin}{written}{end}".encode()), start.deep_copy()
        is_whole = copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()
        assert is_whole == is_right, written


LONG = "1" * 19
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/N"}, "value": {}}}
PARTLY_FREE = {  # schema, texts that fit, beginnings that do not fit
    "property": (
        {"type": "object", "properties": {"a": {}, "$ref": {"title": "A value"}}},
        [
            '{"a": 1.5}',
            '{"a": [1, {"b": []}], "c": null}',
            '{"$ref": "x"}',
            '{"a": ' + "1" * 18 + "}",
        ],
        ['{"a": ', '{"$ref": ', '{"a": [{"b": ', '{"c": ', '{"a": 0.', '{"c": {"d": '],
    ),
    "no type": (
        {"properties": {"a": {"type": "string"}}, "minItems": 1},
        ['{"a": "x", "b": 2}', "3", "[1]", "null", "true", '"x"'],
        ["", "[", '{"b": ', '{"a": 1'],
    ),
    "no items": ({"type": "array", "minItems": 1}, ["[1, [2], 0.25]"], ["[", "[[", "[1, "]),
    "prefix": (
        {"type": "array", "prefixItems": [{}, {"type": "string"}]},
        ['[1, "a", 2]'],
        ["[", '[1, "a", '],
    ),
    "list of items": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [True, {"const": 1}]},
        ['["a", 1, 2]', "7"],
        ["[", "[1, 1, ", "-"],
    ),
    "recursive": (
        {"type": "array", "items": {"$ref": "#/$defs/N"}, "$defs": {"N": NODE}},
        ['[{"next": {"value": 3}}]'],
        ['[{"next": {"next": {"value": ', '[{"other": '],
    ),
    "reference to a free value": (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/definitions/Any"}},
            "definitions": {"Any": {"description": "anything"}},
        },
        ['{"a": {"b": 1}}'],
        ['{"a": ', '{"a": {"b": '],
    ),
    "alternatives": (
        {"title": "T", "anyOf": [{"type": "null"}, {"type": "array"}, NODE | {"required": []}]}
        | {"$defs": {"N": {"type": "integer"}}},
        ["null", "[1]", '{"value": 1}'],
        ["[", '{"value": '],
    ),
    "pattern": ({"type": "object", "patternProperties": {"^x": {}}}, ['{"x1": 1}'], ['{"x1": ']),
    "draft 4": (
        {"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://a/b"}
        | {"type": "object", "properties": {"a": {"type": "array"}}},
        ['{"a": [1], "b": [[2]]}'],
        ['{"a": [', '{"b": [['],
    ),
    "own bound": (
        {"type": "object", "properties": {"a": {"minimum": 5}}},
        ['{"a": 6}', '{"a": "x"}'],
        ['{"a": ', '{"a": -', '{"a": 4}'],
    ),
}


@pytest.mark.parametrize("kind", PARTLY_FREE)
def test_free_values_inside_a_schema_have_numbers_of_limited_length(kind):
    schema, right, begun = PARTLY_FREE[kind]
    start, validator = matcher(schema), judge(schema)
    for written in right:
        validator.validate(json.loads(written))
        copy, tokens = start.deep_copy(), list(written.encode())
        assert copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting(), written
    for written in begun:
        tokens = list((written + LONG).encode())
        assert start.deep_copy().try_consume_tokens(tokens) < len(tokens), written


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"allOf": [NODE, {"properties": {"b": {}}}], "$defs": {"N": NODE}}, {"value": 1, "b": 2}),
        (NODE | {"anyOf": [{"required": ["a"]}, {}], "$defs": {"N": NODE}}, {"next": {"a": 1}}),
        ({"$ref": "#/$defs/N", "required": ["a"], "$defs": {"N": NODE}}, {"next": {}, "a": 1}),
        ({"type": "object", "properties": {"a": {"$id": "http://a/b", "items": {}}}}, {"a": [1]}),
        ({"type": "object", "const": {"a": 10**20}, "properties": {"a": {}}}, {"a": 10**20}),
    ],
)
def test_combined_schemas_keep_their_free_values(schema, value):
    """llguidance cannot intersect recursive schemas, such as that of short free values."""
    check_grammar(StructuredOutputsParams(json=schema))
    assert accepts(matcher(schema), value)


@pytest.mark.parametrize(
    ("options", "right", "wrong"),
    [
        ({"disable_any_whitespace": True}, '{"a":[1,2]}', '{"a": [1,2]}'),
        ({"whitespace_pattern": "[ /]*"}, '{ /"a":  [1,2]}', '{\n"a": [1,2]}'),
    ],
)
def test_free_json_has_the_requested_white_space(options, right, wrong):
    start = matcher(json_object=True, **options)
    assert start.deep_copy().try_consume_tokens(list(right.encode())) == len(right)
    assert start.deep_copy().try_consume_tokens(list(wrong.encode())) < len(wrong)
