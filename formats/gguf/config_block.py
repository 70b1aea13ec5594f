"""Quantization block of config.json for a GGUF file: the form in which kernels run each linear.

No GGUF file contains this block. It is made from the types of the file's tensors, so that readers
find the scheme of a module in the usual way.
"""

from collections.abc import Mapping
from typing import Any

from formats.errors import CheckpointError
from formats.gguf.kernel_forms import KERNEL_FORMS
from formats.rules import Rule, exact_patterns, split_schemes
from formats.scheme import Scheme

METHOD = "gguf"
HEAD = "lm_head"


def read(block: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a QuantConfig. Raises CheckpointError, naming the key."""
    try:
        scheme = _scheme(block["form"])
        rules = tuple(
            Rule(kind="regex", text=text, scheme=_scheme(form)) for text, form in block["modules"]
        )
        lm_head = bool(block["lm_head"])
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(METHOD, f"is damaged: {error!r:.60}", "remove its folder") from None
    return {"scheme": scheme, "rules": rules, "layout": METHOD, "lm_head": lm_head}


def write(schemes: Mapping[str, Scheme | None], types: Mapping[str, int]) -> dict[str, Any]:
    """Return the block from the scheme of each linear and the number of linears of each type.

    A scheme of None means that the linear is read as floats.
    """
    main, others = split_schemes(schemes)
    rules = exact_patterns(schemes, others) if main is not None else []
    return {
        "quant_method": METHOD,
        "types": dict(types),
        "form": _form(main),
        "modules": [[text, _form(scheme)] for text, scheme in rules],
        "lm_head": schemes.get(HEAD) is not None,
    }


def _scheme(form: str | None) -> Scheme | None:
    return None if form is None else KERNEL_FORMS[form].scheme


def _form(scheme: Scheme | None) -> str | None:
    """Return the name of a scheme's form; None: floats."""
    if scheme is None:
        return None
    return next(name for name, form in KERNEL_FORMS.items() if form.scheme == scheme)
