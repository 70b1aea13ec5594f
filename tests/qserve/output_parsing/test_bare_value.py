"""Bare texts become JSON of the type that the tool's schema allows."""

import json

import jsonschema
import pydantic
import pytest

from qserve.output_parsing.notations.argument_schema import ArgumentSchema
from qserve.output_parsing.notations.bare_value import typed


def value_of(text, schema, key="x"):
    return json.loads(typed(text, ArgumentSchema(schema), key))


def is_same(found, value):
    return found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        (" 3 ", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("3e2", {"type": "integer"}, 300),
        ("+3", {"type": "integer"}, 3),
        ("1_000", {"type": "integer"}, "1_000"),
        ("2.5", {"type": "integer"}, "2.5"),
        ("12345678901234567890", {"type": "number"}, 12345678901234567890),
        ("2.5", {"type": "number"}, 2.5),
        ("3.0", {"type": "number"}, 3.0),
        (".5", {"type": "number"}, 0.5),
        ("nan", {"type": "number"}, "nan"),
        ("1e999", {"type": "number"}, "1e999"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("False", {"type": "boolean"}, False),
        ("None", {"type": ["null", "string"]}, None),
        ("12", {"type": ["string", "null"]}, "12"),
        ("12", {"type": ["string", "integer"]}, 12),
        ("null", {"type": "integer", "nullable": True}, None),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("{'a': True, 'b': [None, 1.5], 'c': (1,)}", {"type": "object"},
         {"a": True, "b": [None, 1.5], "c": [1]}),
        ("{'it': \"it's\", 'ok': true}", {"type": "object"}, {"it": "it's", "ok": True}),
        ("{1: 'one'}", {"type": "object"}, {"1": "one"}),
        ('{"a": "1\n2"}', {"type": "object"}, {"a": "1\n2"}),
        ("[NaN]", {"type": "array"}, "[NaN]"),
        ("[1", {"type": "array"}, "[1"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("[1]", {"type": "object"}, "[1]"),
        ("[1]", {"items": {"type": "integer"}}, [1]),
        ("{}", {"properties": {}}, {}),
        ("2", {"minimum": 1}, 2),
        ("2", {"minLength": 1}, "2"),
        ("2", {}, "2"),
        ("2", True, "2"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"enum": [1, "2"]}, "2"),
        ("a", {"enum": [1, "a", None]}, "a"),
        ("null", {"enum": [1, "a", None]}, None),
        ("None", {"enum": [1, "None"]}, "None"),
        ("true", {"const": True}, True),
        ("true", {"enum": [1, "true"]}, "true"),
        ("2", {"const": 2}, 2),
        ("1", {"type": "number", "enum": [1, 2]}, 1),
        ("1", {"anyOf": [{"const": "1"}, {"type": "boolean"}]}, "1"),
        ("1", {"allOf": [{"type": "number"}, {"type": "integer"}]}, 1),
        ("1", {"allOf": [{"minimum": 0}, {"description": "n"}]}, 1),
        ("1", {"oneOf": [{"type": "integer"}, {"type": "array"}]}, 1),
        ("1", {"anyOf": [{}, {"description": "any"}]}, "1"),
    ],
)  # fmt: skip
def test_bare_value_is_converted_to_schema_type(text, schema, value):
    found = value_of(text, {"properties": {"x": schema}})
    assert is_same(found, value)


DEFS = {
    "N": {"type": "integer"},
    "M": {"$ref": "#/$defs/N", "description": "A number."},
    "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}},
    "Loop": {"$ref": "#/$defs/Loop"},
    "a/b~c": {"type": "boolean"},
    "named": {"$anchor": "flag", "type": "boolean"},
    "Deep": {"properties": {"list": {"prefixItems": [{"type": "null"}, {"type": "number"}]}}},
}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1", {"$ref": "#/$defs/N"}, 1),
        ("1", {"$ref": "#/$defs/M"}, 1),
        ("1", {"allOf": [{"$ref": "#/$defs/M"}], "default": 3}, 1),
        ("None", {"anyOf": [{"$ref": "#/$defs/M"}, {"type": "null"}]}, None),
        ('{"next": {}}', {"$ref": "#/$defs/Node"}, {"next": {}}),
        ("1", {"$ref": "#/$defs/Loop"}, "1"),
        ("true", {"$ref": "#/$defs/a~1b~0c"}, True),
        ("true", {"$ref": "#flag"}, True),
        ("1.5", {"$ref": "#/$defs/Deep/properties/list/prefixItems/1"}, 1.5),
        ("{}", {"$ref": "#"}, {}),
        ("1", {"$ref": "#/$defs/nowhere"}, "1"),
        ("1", {"$ref": "https://example.org/schema"}, "1"),
    ],
)
def test_schema_references_are_resolved(text, schema, value):
    root = {"type": "object", "properties": {"x": schema}, "$defs": DEFS}
    assert is_same(value_of(text, root), value)


@pytest.mark.parametrize(
    ("root", "values"),
    [
        ({"additionalProperties": {"type": "integer"}}, {"x": 1}),
        ({"additionalProperties": True}, {"x": "1"}),
        ({"patternProperties": {"^n_": {"type": "integer"}, "^s_": {"type": "string"}},
          "additionalProperties": {"type": "array"}}, {"n_a": 1, "s_a": "1", "x": "1"}),
        ({"patternProperties": {"(a+)+$": {"type": "integer"}}}, {"a" * 100 + "b": 1}),
        ({"patternProperties": {"(": {"type": "integer"}}}, {"x": 1}),
        ({"allOf": [{"properties": {"x": {"type": "integer"}}}, {"required": ["x"]}]}, {"x": 1}),
        ({"anyOf": [{"properties": {"x": {"type": "integer"}}},
                    {"properties": {"y": {"type": "string"}}}]}, {"x": 1, "y": "1"}),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"x": {"type": "integer"}}}}},
         {"x": 1}),
        ({"properties": []}, {"x": "1"}),
        ([], {"x": "1"}),
    ],
)  # fmt: skip
def test_argument_schema_lookup(root, values):
    for key, value in values.items():
        assert is_same(value_of("1", root, key), value), key


def test_arguments_of_pydantic_models_are_valid():
    class Address(pydantic.BaseModel):
        street: str
        number: int | None = None

    class Level(pydantic.RootModel):
        root: int

    class Arguments(pydantic.BaseModel):
        home: Address
        work: Address | None
        others: list[Address]
        by_name: dict[str, Address]
        level: Level
        flag: bool = False
        zip: str

    schema = Arguments.model_json_schema()
    texts = {
        "home": '{"street": "a", "number": 1}',
        "work": "None",
        "others": "[{'street': 'b', 'number': None}]",
        "by_name": '{"me": {"street": "c"}}',
        "level": "7.0",
        "flag": "True",
        "zip": "01234",
    }
    found = {key: value_of(text, schema, key) for key, text in texts.items()}
    jsonschema.validate(found, schema)
    read = Arguments.model_validate(found, strict=True)
    assert (read.level.root, read.zip, read.work, read.flag) == (7, "01234", None, True)


def test_exponential_schemas_are_fast():
    """Each definition is two of the next; resolved one by one they would be 2 to the power 60."""
    definitions = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(60)
    }
    root = {"properties": {"x": {"$ref": "#/$defs/d0"}}}
    root["$defs"] = definitions | {"d60": {"enum": [1, 2]}}
    assert value_of("3", root) in (3, "3") and value_of("2", root) == 2
