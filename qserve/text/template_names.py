"""Names that a chat template reads, and errors of rendering one.

jinja2 takes 0.2 s to import, which an engine without a conversation never needs.
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
DEFAULTS = frozenset(jinja2.Environment().globals)  # names that every template has


class _Generation(jinja2.ext.Extension):
    """Render the contents of transformers' own tag {% generation %}."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def names_read(template: str) -> frozenset[str]:
    """Names that a template does not define; none if it cannot be parsed."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
    try:
        tree = environment.parse(template)
    except (jinja2.TemplateError, ValueError, RecursionError, MemoryError):
        return frozenset()
    return frozenset(jinja2.meta.find_undeclared_variables(tree))
