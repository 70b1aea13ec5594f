"""Settings of the commands that are no server: quantize, convert, generate, chat, batches, eval.

Each is a field, a flag and its documentation, as in config.py. Loads no torch.
"""

from dataclasses import dataclass

from formats.names import FORMATS, KV_CACHES, RECIPES
from qserve.setting import REQUIRED, check_settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    """What `qserve quantize` is told beside the model."""

    output: str = setting(REQUIRED, "folder to write; must not exist, or be empty")
    scheme: str = setting(
        "w4a16-sym", "numerics of the linear layers, such as w4a16-sym, w8a8, w8a8-fp8"
    )
    format: str | None = setting(
        None, "layout on disk; default: the one that most servers load the scheme from", FORMATS
    )
    recipe: str | None = setting(
        None,
        "how codes are chosen; rtn: round to nearest, without data (default: gptq at 4 bits,"
        " smoothquant+gptq at w8a8, else rtn)",
        RECIPES,
    )
    target: str | None = setting(
        None, "of a draft head: the model that it drafts for, whose states calibrate it"
    )
    calibration: str | None = setting(
        None,
        "texts for calibration: .txt, .jsonl with text or messages, .parquet, or a data set's name"
        " or folder (default: a small set that comes with the package)",
    )
    samples: int = setting(128, "calibration windows", low=1)
    sequence_length: int = setting(2048, "tokens of a calibration window", low=2)
    kv_cache_scheme: str | None = setting(
        None,
        "also write the scales of an 8-bit KV cache (compressed-tensors only)",
        tuple(KV_CACHES),
    )
    kv_per_head: bool = setting(
        False, "with --kv-cache-scheme: a separate scale for each KV head (vLLM: FlashAttention 3)"
    )
    seed: int = setting(0, "seed of the order of the texts, and of rotations")
    eval_text: str | None = setting(
        None, "file to measure perplexity on, before and after, in windows of 1024 tokens"
    )
    adapter: str | None = setting(
        None, "LoRA adapter (PEFT folder) that the data runs with; only the base is quantized"
    )
    spill: str | None = setting(None, "folder for the data's hidden states, to save memory")
    group_size: int | None = setting(
        None, "inputs that share a scale; -1: one scale for each output (default: 128)"
    )
    device: str = setting(
        "auto",
        "where to compute; auto: the GPU if there is one; all: every GPU that is visible; or some,"
        " such as cuda:0,cuda:1",
    )
    bits: float | None = setting(
        None,
        "mean bits per weight, scales included: each linear gets 2 to 8, depending on what the"
        " data says it needs (compressed-tensors)",
        low=2,
        high=9,
    )
    config: str | None = setting(
        None, "recipe file (YAML) with these settings; flags on the command line take precedence"
    )
    act_order: bool = setting(
        False,
        "group inputs of similar magnitude and write the index of groups (gptq): more accurate,"
        " slower to"
        " run, refused by vLLM 0.33",
    )
    ignore: list[str] = setting(
        [],
        "leave in float the linears whose name contains this, matches this glob or re:EXPRESSION;"
        " may be given again",
    )
    override: list[str] = setting(
        [], "PATTERN=SCHEME: another scheme for some linears; may be given again"
    )
    pad: bool = setting(
        False, "widen the feed-forward with zeros where its size does not fit the groups"
    )
    max_shard_size: str = setting("2GB", "most bytes of one weight file, such as 500MB")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """What `qserve convert` is told beside the folder to read."""

    output: str = setting(REQUIRED, "folder to write; must not exist, or be empty", positional=True)
    format: str = setting(REQUIRED, "layout on disk", FORMATS)
    max_shard_size: str = setting("1GB", "most bytes of one weight file, such as 500MB")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """What `qserve generate` is told beside the engine's settings."""

    prompt: str = setting(REQUIRED, "text to continue, or the user's message with --chat")
    chat: bool = setting(False, "apply the model's chat template")
    max_tokens: int = setting(128, "most tokens to generate")
    temperature: float = setting(0.0, "0: always the likeliest token")
    top_p: float = setting(1.0, "keep the likeliest tokens up to this probability")
    top_k: int = setting(0, "keep this many of the likeliest tokens; 0: all")


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkConfig:
    """What `qserve chat` and `qserve complete` are told."""

    url: str = setting("http://127.0.0.1:8000/v1", "the server, up to its /v1")
    model_name: str | None = setting(None, "the model; default: the server's first")
    api_key: str | None = setting(
        None, "the server's key; default: the environment's QSERVE_API_KEY or OPENAI_API_KEY"
    )
    quick: str | None = setting(None, "answer this one text and exit")
    system_prompt: str | None = setting(None, "system message at the beginning of a chat")
    max_tokens: int | None = setting(None, "most tokens of an answer", low=1)
    temperature: float | None = setting(None, "default: the server's", low=0, high=2)
    top_p: float | None = setting(None, "default: the server's", low=0, high=1)
    seed: int | None = setting(None, "for the same answer again, where the server can do that")
    stats: bool = setting(False, "print the time to the first token, and tokens per second")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """What `qserve run-batch` is told beside the engine's settings."""

    input: str = setting(REQUIRED, "file with a request in each line, in OpenAI's batch format")
    output: str = setting(REQUIRED, "file for the answers, in the order in which they end")
    served_model_name: list[str] = setting(
        [], "names that requests may give; default: the model folder as typed", many=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """What `qserve eval` is told beside the engine's settings."""

    text: str = setting(REQUIRED, "file to measure on: .jsonl with a text field, or plain text")
    sequence_length: int = setting(1024, "tokens of a window", low=2)
    windows: int | None = setting(
        None, "number of windows; default: all that the file fills", low=1
    )
    json: bool = setting(False, "print the result as JSON")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectConfig:
    """What `qserve inspect` is told beside the folder."""

    json: bool = setting(False, "print the findings as JSON")
    deep: str | None = setting(
        None, "a float model folder: load both models and compare their logits"
    )
