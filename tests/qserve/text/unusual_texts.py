"""Texts that are hard for tokenizers: split characters, control characters, many scripts."""

TEXTS = [
    "plain words, then 3.14!  two  spaces\n\n\ttabs\r\n",
    "日本語の文章と中文，한국어도",
    "👩‍👩‍👧‍👦 family, 🇫🇷 flag, 👍🏽 tone, 𝔘𝔫𝔦",
    "e\u0301a\u0308o\u0302 combining, z\u0335\u0321\u034f algo",
    "\x00\x01\x07\x1b[31m\x7f\x85\u200b\u2028\ufeff",
    "a real \ufffd stays, two \ufffd\ufffd as well",
    "مرحبا بالعالم नमस्ते दुनिया",
    "",
]
