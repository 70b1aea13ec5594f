"""Loads the tokenizer of a model folder as transformers does, without importing transformers twice.

A folder that AutoTokenizer has loaded before has a record on disk, which is read without
transformers (tokenizer_record.py). For other folders AutoTokenizer is imported, which takes
seconds. It first imports the class of the folder's config, which imports torch's compiler and more,
and takes another second or two. If tokenizer_config.json names the tokenizer's class, AutoTokenizer
reads only fields of the config, so it gets a generic config instead.
"""

import json
import sys
from pathlib import Path
from typing import Any

from formats.architecture.text_part import WITH_OUTPUT_WINDOW
from formats.files.model_path import model_folder
from qserve.text.plamo_tokenizer import FILE, load_plamo_tokenizer
from qserve.text.tokenizer_record import read_record, record_path, write_record

# Once it is imported, programs may have registered classes of their own in it.
AUTO_TOKENIZER = "transformers.models.auto.tokenization_auto"

# architecture -> chat template of models that have none: the texts as they are
TEMPLATES = {
    "PaliGemmaForConditionalGeneration": (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
        "{% else %}{% for part in message.content %}"
        "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% endfor %}"
    ),
    **dict.fromkeys(
        (
            "DeepseekOCRForCausalLM",
            "DeepseekOCR2ForCausalLM",
            "DeepseekOcr2ForConditionalGeneration",
            *WITH_OUTPUT_WINDOW,
        ),
        "{{ bos_token }}{% for message in messages %}{% if message.content is string %}"
        "{{ message.content }}{% else %}{% for part in message.content %}"
        "{{ '<image>\n' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
        "{% endfor %}",
    ),
}


def load_tokenizer(folder: str | Path) -> Any:
    """Load a tokenizer without running the folder's code.

    Returns a tokenizer of transformers, or a RecordedTokenizer that equals it. Raises any exception
    of transformers and of the files' parsers.
    """
    folder = model_folder(folder)
    if AUTO_TOKENIZER in sys.modules:
        return _by_transformers(folder)
    record = record_path(folder)
    tokenizer = record and read_record(record, folder)
    if tokenizer is None:
        tokenizer = _by_transformers(folder)
        if record is not None and record == record_path(folder):  # no file has changed meanwhile
            write_record(record, folder, tokenizer)
    return tokenizer


def _by_transformers(folder: Path) -> Any:
    # Imported here, not at module level: the import takes seconds.
    from transformers import AutoTokenizer

    given = {"trust_remote_code": False, "local_files_only": True}
    if _names_its_class(folder):
        given["config"] = _bare_config(folder)
    if (folder / FILE).is_file() and not (folder / "tokenizer.json").is_file():
        tokenizer = load_plamo_tokenizer(folder, _read(folder, "tokenizer_config.json"))
    else:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **given)
    # A vision-language model's processor has its own template, which renders image parts.
    template = _read(folder, "chat_template.json").get("chat_template")
    if isinstance(template, str):
        tokenizer.chat_template = template
    if not tokenizer.chat_template:
        names = _read(folder, "config.json").get("architectures")
        tokenizer.chat_template = TEMPLATES.get(names[0]) if isinstance(names, list) else None
    return tokenizer


def _names_its_class(folder: str | Path) -> bool:
    stated = _read(folder, "tokenizer_config.json")
    return isinstance(stated.get("tokenizer_class"), str) and "auto_map" not in stated


def _bare_config(folder: str | Path) -> Any:
    """Return config.json as a generic config; None if it cannot be read."""
    from transformers import PreTrainedConfig

    values = _read(folder, "config.json")
    try:
        return PreTrainedConfig.from_dict(values, name_or_path=str(folder)) if values else None
    except Exception:  # AutoTokenizer reports the error
        return None


def _read(folder: str | Path, name: str) -> dict:
    """Read a JSON object from a file; {} if the file is missing or has no object."""
    try:
        found = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
