"""Import of matplotlib, an optional package for plots. Loads no torch."""

from typing import Any

from formats.errors import InputError


def import_pyplot(subject: str) -> Any:
    """Return matplotlib.pyplot, with the backend that draws to files.

    Raises InputError about `subject` if matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise InputError(subject, "needs matplotlib", "pip install matplotlib") from None
    return pyplot
