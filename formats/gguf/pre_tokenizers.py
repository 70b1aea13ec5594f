"""Rules by which a byte-level tokenizer splits text into words, by `tokenizer.ggml.pre`.

A rule is a list of regular expressions. Each one splits the pieces of the previous one; matches and
the text between them are both kept. Source: llama.cpp, src/llama-vocab.cpp, which follows each
model's tokenizer.json. Needs no torch.
"""

from dataclasses import dataclass

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 = rf"{CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}|{_SPACES}"
QWEN2 = rf"{CONTRACTIONS}|{_WORDS}|\p{{N}}|{_OTHERS}|{_SPACES}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"


def _by_case(after: str, digits: str) -> str:
    return (
        rf"{_START}{_UPPER}*{_LOWER}+{after}|{_START}{_UPPER}+{_LOWER}*{after}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


TEKKEN = _by_case("", r"\p{N}")
GPT4O = _by_case(f"{CONTRACTIONS}?", r"\p{N}{1,3}")
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    _CJK,
    rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)
SEED_CODER = rf"{CONTRACTIONS}|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
# Jais 2: as Llama 3, except that runs of spaces are cut into powers of two
_RUNS = "|".join(rf"\s{{{1 << n}}}(?!\S)" for n in range(9, 1, -1))
JAIS2 = LLAMA3.replace(_SPACES, rf"\s*[\r\n]+|{_RUNS}|\s{{1,2}}(?!\S)|\s{{1}}")
STOPS = ".,!?…。，、।۔،"
BLOOM = rf" ?[^(\s|{STOPS})]+"
POSSESSIVE = r"'(?i:[sdmt]|ll|ve|re)"
BAILING = rf"{POSSESSIVE}|{_WORDS}|\p{{N}}|{_OTHERS}|\s*[\r\n]|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """One pre-tokenizer of the table."""

    names: tuple[str, ...]
    splits: tuple[str, ...]
    ignore_merges: bool = False  # a word in the vocabulary is always one token, despite merges
    adds_bos: bool = False  # used if the file does not state it


_ROWS = (
    PreTokenizer(
        names=(
            *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
            *("lfm2", "jina-v5-nano"),
        ),
        splits=(LLAMA3,),
        ignore_merges=True,
        adds_bos=True,
    ),
    PreTokenizer(names=("tekken",), splits=(TEKKEN,), ignore_merges=True, adds_bos=True),
    PreTokenizer(names=("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), splits=(LLAMA3,)),
    PreTokenizer(
        names=(
            *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"),
            *("solar-open", "grok-2"),
        ),
        splits=(QWEN2,),
    ),
    PreTokenizer(names=("qwen35",), splits=(QWEN35,)),
    PreTokenizer(
        names=(
            *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"),
            *("gigachat", "a.x-4.0", "mellum", "modern-bert", "roberta-bpe"),
        ),
        splits=(GPT2,),
    ),
    PreTokenizer(
        names=(
            *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
            "mellum2",
        ),
        splits=(r"\p{N}", GPT2),
    ),
    PreTokenizer(names=("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), splits=(GPT4O,)),
    PreTokenizer(names=("tiny_aya", "cohere2moe"), splits=TINY_AYA),
    PreTokenizer(names=("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), splits=DEEPSEEK3),
    PreTokenizer(
        names=("deepseek-coder",),
        splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    ),
    PreTokenizer(names=("falcon",), splits=(r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    PreTokenizer(names=("seed-coder",), splits=(SEED_CODER,)),
    PreTokenizer(names=("jais-2",), splits=(JAIS2,)),
    PreTokenizer(names=("bloom", "poro-chat", "gpt3-finnish"), splits=(BLOOM,)),
    PreTokenizer(names=("bailingmoe", "bailingmoe2", "llada-moe"), splits=(BAILING,)),
    PreTokenizer(
        names=("default", ""),
        splits=(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ),
)
PRE_TOKENIZERS = {name: row for row in _ROWS for name in row.names}
