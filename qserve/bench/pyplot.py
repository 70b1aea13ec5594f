"""Import of matplotlib, an optional dependency for plots. Loads no torch."""

from typing import Any

from formats.errors import InputError


def import_pyplot(subject: str) -> Any:
    """Return matplotlib.pyplot with a file backend.

    Raises InputError about `subject` without it.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise InputError(subject, "needs matplotlib", "pip install matplotlib") from None
    return pyplot
