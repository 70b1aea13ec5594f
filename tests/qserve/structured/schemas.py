"""Two hundred JSON schemas of the kinds that people send: every keyword that is served, combined.

Made of parts, so that each keyword meets the others; no random numbers.
"""

from itertools import combinations, islice


def closed(properties, required=None, **more):
    """An object that has nothing but these properties."""
    required = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    } | more


TEXT = {"type": "string", "maxLength": 8}
WHOLE = {"type": "integer", "minimum": -3, "maximum": 40}
# Values, each by the keyword that it shows.
VALUES = {
    "name": TEXT,
    "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "size": {"type": "string", "minLength": 2, "maxLength": 4},
    "day": {"type": "string", "format": "date"},
    "moment": {"type": "string", "format": "date-time"},
    "id": {"type": "string", "format": "uuid"},
    "host": {"type": "string", "format": "ipv4"},
    "level": {"enum": ["low", "middle", "high"]},
    "mixed": {"enum": [1, "one", None, True]},
    "kind": {"const": "event"},
    "count": WHOLE,
    "ratio": {"type": "number", "minimum": 0, "maximum": 1},
    "even": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 20},
    "above": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 9},
    "flag": {"type": "boolean"},
    "nothing": {"type": "null"},
    "maybe": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    "optional": {"anyOf": [TEXT, {"type": "null"}]},
    "either": {"anyOf": [WHOLE, {"enum": ["none"]}]},
    "one": {"oneOf": [{"const": "x"}, {"type": "boolean"}]},
    "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    "rows": {"type": "array", "items": WHOLE, "minItems": 1, "maxItems": 4},
    "pair": {"type": "array", "prefixItems": [WHOLE, TEXT], "items": False, "minItems": 2},
    "grid": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "maxItems": 2,
    },
    "place": closed({"x": WHOLE, "y": WHOLE}),
    "deep": closed({"inner": closed({"leaf": {"enum": ["end"]}})}),
    "extra": {"type": "object", "additionalProperties": WHOLE, "maxProperties": 2},
    "both": {"allOf": [{"type": "integer", "minimum": 0}, {"maximum": 5}]},
}

TREE = {
    "$defs": {
        "node": closed(
            {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
            }
        )
    },
    "$ref": "#/$defs/node",
}
SHARED = closed({"home": {"$ref": "#/$defs/at"}, "work": {"$ref": "#/$defs/at"}}) | {
    "$defs": {"at": closed({"x": WHOLE, "near": {"type": "boolean"}})}
}
CALL = {
    "anyOf": [
        closed({"tool": {"const": "search"}, "query": TEXT}),
        closed({"tool": {"const": "add"}, "a": WHOLE, "b": WHOLE}),
    ]
}


def all_schemas():
    """(name, schema), two hundred of them."""
    yield "tree", TREE
    yield "shared", SHARED
    yield "call", CALL
    yield "list of calls", {"type": "array", "items": CALL, "minItems": 1, "maxItems": 2}
    for name, value in VALUES.items():
        yield name, value
        yield f"{name} in an object", closed({name: value})
        yield f"{name}, optional", closed({"first": WHOLE, name: value}, ["first"])
        yield f"list of {name}", {"type": "array", "items": value, "minItems": 1, "maxItems": 2}
    left = 200 - 4 - 4 * len(VALUES)
    for names in islice(combinations(VALUES, 3), 0, None, 38):
        if left == 0:
            return
        left -= 1
        yield " and ".join(names), closed({name: VALUES[name] for name in names}, list(names)[:2])
