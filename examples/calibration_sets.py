"""Make three calibration sets from a collection of documents: prose, documents, and chats.

    python examples/calibration_sets.py texts.jsonl FOLDER

Writes prose.jsonl, docs.jsonl and chat.jsonl into the folder, for `compare_recipes.py`. Prose has
only running text: paragraphs without headings, code, lists and tables. Documents are unchanged. In
a chat the user asks for sections of a document by their headings, and the answers are the sections.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# First characters of lines of headings, lists, tables, code and front matter
MARKUP = re.compile(r"^(#|\||[-*+>.:=~`<\[]|\d+\.|    |\t|[\w-]+: )", re.MULTILINE)
SECTION = re.compile(r"^#+ +(?P<markdown>.+)$|^(?P<rest>[A-Z].+)\n[=-]{4,}$", re.MULTILINE)
SHORTEST = 200  # characters of an answer, or of a paragraph


def split(texts: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each set, by its name."""
    return {
        "prose": [{"text": prose} for text in texts if (prose := paragraphs(text))],
        "docs": [{"text": text} for text in texts],
        "chat": [chat for text in texts if (chat := as_chat(text)) is not None],
    }


def paragraphs(text: str) -> str:
    """Return the paragraphs of running text, one line each, or "" if there are none."""
    found = (each.strip("\n") for each in CODE.sub("", text).split("\n\n"))
    running = (each for each in found if len(each) >= SHORTEST and not MARKUP.search(each))
    return "\n\n".join(" ".join(each.split()) for each in running)


def as_chat(text: str) -> dict[str, Any] | None:
    """Return a chat about up to four sections of a text, or None if it has no sections."""
    found = list(SECTION.finditer(text))
    messages = []
    ends = [*(section.start() for section in found), len(text)][1:]
    for section, end in zip(found, ends, strict=True):
        answer = text[section.end() : end].strip()
        if len(answer) >= SHORTEST and len(messages) < 8:
            heading = (section["markdown"] or section["rest"]).strip()
            messages.append({"role": "user", "content": f"Explain: {heading}"})
            messages.append({"role": "assistant", "content": answer})
    return {"messages": messages} if messages else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", help="JSON Lines with a text field")
    parser.add_argument("folder")
    arguments = parser.parse_args()
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines = Path(arguments.texts).read_text().splitlines()
    for name, rows in split([json.loads(line)["text"] for line in lines]).items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
        print(f"{name}: {len(rows)} rows, {len(text)} characters")


if __name__ == "__main__":
    main()
