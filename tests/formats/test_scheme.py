"""Scheme names there and back, and the shapes that a spec refuses."""

import pytest

from formats.errors import SchemeError
from formats.scheme import FIXED_SCHEMES, SCHEMES, ActivationSpec, QuantSpec, Scheme


@pytest.mark.parametrize("name", sorted(SCHEMES.keys() - FIXED_SCHEMES.keys()))
@pytest.mark.parametrize("suffix", ["", "-g32", "-g64", "-g1024", "-channel"])
def test_printed_scheme_round_trips(name, suffix):
    scheme = Scheme.parse(name + suffix)
    assert str(scheme) == name + suffix
    assert Scheme.parse(str(scheme)) == scheme
    assert Scheme.parse(scheme) is scheme


@pytest.mark.parametrize("name", FIXED_SCHEMES)
def test_scheme_of_one_kind_round_trips_and_takes_no_group_size(name):
    scheme = Scheme.parse(name)
    assert str(scheme) == name
    assert Scheme.parse(name, group_size=scheme.weight.group_size) == scheme
    for text, group_size in ((f"{name}-g64", None), (name, 64)):
        with pytest.raises(SchemeError, match="scales are fixed"):
            Scheme.parse(text, group_size)


def test_unnamed_scheme_is_described():
    odd = Scheme(weight=FIXED_SCHEMES["w8a8-fp8-block"].weight, activation=ActivationSpec())
    assert str(odd) == "w8a8-fp8-block128-int8-dynamic-token"


def test_group_size_argument_equals_the_suffix():
    assert Scheme.parse("w4a16-sym", group_size=64) == Scheme.parse("w4a16-sym-g64")
    assert Scheme.parse("w4a16-sym", group_size=-1) == Scheme.parse("w4a16-sym-channel")
    assert Scheme.parse("w4a16-sym-g64", group_size=64) == Scheme.parse("w4a16-sym-g64")
    assert str(Scheme.parse("w4a16-sym-g128")) == "w4a16-sym"


def test_fp8_means_w8a8_with_float8():
    assert Scheme.parse("fp8") == FIXED_SCHEMES["w8a8-fp8"]
    with pytest.raises(SchemeError, match="its scales are fixed"):
        Scheme.parse("fp8", group_size=64)


@pytest.mark.parametrize(
    "text", ["", "w4a16", "w5a16-sym", "W4A16-SYM", "w4a16-sym-g", "-g32", "\n"]
)
def test_unknown_scheme_error_lists_known_schemes(text):
    with pytest.raises(SchemeError, match="w4a16-sym"):
        Scheme.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w4a16-g64", "give w4a16-sym-g64 or w4a16-asym-g64"),
        ("w4a16-g100", "multiple of 8, found 100"),
        ("w5a16-g64", "unknown"),
    ],
)
def test_near_miss_scheme_error_suggests_fix(text, message):
    with pytest.raises(SchemeError, match=message):
        Scheme.parse(text)


def test_conflicting_group_sizes_are_refused():
    with pytest.raises(SchemeError, match="another group size"):
        Scheme.parse("w4a16-sym-g64", group_size=128)


@pytest.mark.parametrize("group_size", [0, 7, 12, -2, -128])
def test_odd_group_size_is_refused(group_size):
    with pytest.raises(SchemeError, match="group size"):
        Scheme.parse("w4a16-sym", group_size=group_size)


@pytest.mark.parametrize("bits", [1, 9])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(SchemeError, match="expected 2 to 8"):
        QuantSpec(bits=bits, symmetric=True)


@pytest.mark.parametrize(
    ("shape", "group_size", "message"),
    [
        ((64, 192), 128, "not divisible by the group size 128"),
        ((64, 0), -1, "is empty"),
        ((0, 128), 128, "is empty"),
    ],
)
def test_shape_not_divisible_by_group_is_refused_by_name(shape, group_size, message):
    with pytest.raises(SchemeError, match=message) as caught:
        QuantSpec(bits=4, symmetric=True, group_size=group_size).check_shape("layers.3.up", *shape)
    assert "layers.3.up" in str(caught.value)
