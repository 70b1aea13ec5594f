"""Random schemas of every keyword that is rewritten: what their grammars write is valid."""

import json
import random

import pytest

from qserve.errors import ParameterError
from qserve.structured.grammar import check_grammar, unenforced
from qserve.structured.params import StructuredOutputsParams
from tests.qserve.structured.test_schema_rewrite import judge, matcher, walk

LEAVES = (
    {"type": "string", "maxLength": 3},
    {"type": "integer", "minimum": 0, "maximum": 4},
    {"type": "boolean"},
    {"enum": ["a", 1, None]},
    {"enum": ["b", 2, 1.5, True]},
    {"const": []},
)
PATTERNS = ("^(?!a)[ab]*$", "^(?=.*b)[ab]+$", "a(?!b)")


def schema(rng, depth):
    if not depth:
        return rng.choice(LEAVES)

    def inner():
        return schema(rng, depth - 1)

    kind = rng.choice(("object", "object", "array", "anyOf", "allOf", "oneOf", "if", "not", "text"))
    if kind == "object":
        return of_object(rng, inner)
    if kind == "array":
        return of_array(rng, inner)
    if kind == "if":
        return {"if": inner(), "then": inner(), "else": inner()}
    if kind == "not":
        return {"type": rng.choice(("string", "integer", "object")), "not": inner()}
    if kind == "text":
        return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 4}
    return {kind: [inner(), inner()]}


def of_object(rng, inner):
    names = rng.sample("abcd", rng.randint(1, 3))
    further = {
        "dependentRequired": {rng.choice("abcd"): [rng.choice("abcd")]},
        "dependentSchemas": {rng.choice("abcd"): inner()},
        "minProperties": rng.randint(0, 3),
        "maxProperties": rng.randint(1, 3),
        "propertyNames": rng.choice([{"enum": names}, {"pattern": "^[a-c]"}, {"maxLength": 2}]),
        "if": {"properties": {names[0]: inner()}, "required": names[:1]},
        "not": {"required": [rng.choice("abcd")]},
    }
    found = {"type": "object", "properties": {name: inner() for name in names}}
    found["required"] = rng.sample(names, rng.randint(0, len(names)))
    found["additionalProperties"] = rng.choice([False, False, inner()])
    found |= {name: value for name, value in further.items() if rng.random() < 0.2}
    return found | ({"then": {"required": names}} if "if" in found else {})


def of_array(rng, inner):
    further = {
        "maxItems": rng.randint(0, 4),
        "minItems": rng.randint(0, 2),
        "uniqueItems": True,
        "contains": inner(),
    }
    found = {"type": "array", "items": inner()}
    found |= {name: value for name, value in further.items() if rng.random() < 0.4}
    if "contains" in found and rng.random() < 0.5:
        found |= {"minContains": rng.randint(0, 2), "maxContains": rng.randint(0, 2)}
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4))
def test_texts_of_random_schemas_are_valid(seed):
    rng, num_texts = random.Random(seed), 0
    for _ in range(200):
        stated = schema(rng, rng.randint(1, 3))
        params = StructuredOutputsParams(json=stated)
        try:
            check_grammar(params)
        except ParameterError as error:
            assert "nsatisfiable" in error.problem or "greater than" in error.problem
            continue
        if unenforced(params):
            continue
        validator, start = judge(stated), matcher(stated)
        for written in filter(None, (walk(start, rng, 150) for _ in range(3))):
            validator.validate(json.loads(written))
            num_texts += 1
    assert num_texts > 100
