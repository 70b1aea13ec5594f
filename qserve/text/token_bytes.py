"""Bytes of a token, from its name in the vocabulary. Needed for tokens that are partial characters.

Byte-level vocabularies (GPT-2 and later) write each byte as one printable character. SentencePiece
vocabularies with byte fallback have a token <0x..> for each byte.
"""

import functools
import re
from typing import Any

FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# "a" and "e with an acute accent", in the byte-level alphabet and as text.
SPELLED, MEANT = "a\u00c3\u00a9", "a\u00e9"


def is_byte_level(backend: Any) -> bool:
    """Return True for a byte-level vocabulary. `backend`: a Tokenizer of the tokenizers library."""
    decoder = getattr(backend, "decoder", None)
    return decoder is not None and decoder.decode([SPELLED]) == MEANT


def spelled_bytes(name: str, byte_level: bool) -> bytes | None:
    """Return the bytes that a token's name spells; None: the name does not spell bytes."""
    if found := FALLBACK.fullmatch(name):
        return bytes([int(found[1], 16)])
    letters = _letters()
    if not byte_level or not all(letter in letters for letter in name):
        return None
    return bytes(letters[letter] for letter in name)


@functools.cache
def _letters() -> dict[str, int]:
    """Return GPT-2's alphabet, letter -> byte.

    Printable bytes are their own letters; the letters of the others are U+0100 and up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}
