"""The names that editors offer are the rows of the tables."""

from typing import get_args

from calibrate.recipe import RECIPES
from formats.layouts import LAYOUTS
from formats.names import FormatName, RecipeName, SchemeName
from formats.scheme import SCHEMES


def test_literal_names_equal_tables():
    assert list(get_args(SchemeName)) == list(SCHEMES)
    assert list(get_args(FormatName)) == list(LAYOUTS)
    assert list(get_args(RecipeName)) == list(RECIPES)
