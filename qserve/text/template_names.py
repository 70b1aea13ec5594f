"""Names that a chat template reads, and exceptions that rendering can raise.

This module imports jinja2, which takes 0.2 s. Import it only to work with chat templates.
"""

import jinja2
import jinja2.ext
import jinja2.meta

RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
)
DEFAULTS = frozenset(jinja2.Environment().globals)  # names that jinja2 defines in every template


class _Generation(jinja2.ext.Extension):
    """Parser of transformers' tag {% generation %}: renders the tag's contents."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def names_read(template: str) -> frozenset[str]:
    """Return the names that a template reads and does not define; empty if it cannot be parsed."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
    try:
        tree = environment.parse(template)
    except (jinja2.TemplateError, ValueError, RecursionError, MemoryError):
        return frozenset()
    return frozenset(jinja2.meta.find_undeclared_variables(tree))
