"""Verdicts on which programs load a folder in Mistral's format."""

from collections.abc import Sequence

from formats.compatibility.loads_in import Verdict

_FLAGS = "--config-format mistral --load-format mistral --tokenizer-mode mistral"
# program -> verdict on a folder whose weights the program can load
_OF_FORMAT = {
    "vLLM": Verdict("vLLM", "yes", f"with {_FLAGS}"),
    "SGLang": Verdict("SGLang", "not judged", "the folder is in Mistral's format"),
    "transformers": Verdict(
        "transformers", "no", "reads only Hugging Face files, which quantize and convert write"
    ),
}


def verdicts_of_format(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Return verdicts on a folder in Mistral's format, from those on a usual folder."""
    return tuple(
        each if each.answer == "no" else _OF_FORMAT.get(each.program, each) for each in verdicts
    )
