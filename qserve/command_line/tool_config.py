"""Settings of the commands other than serve: quantize, convert, generate, chat, run-batch, eval.

Each field is also a flag with its help text, as in config.py. This module loads no torch.
"""

from dataclasses import dataclass

from formats.errors import InputError
from formats.names import (
    AUTO_GROUPS,
    FLOAT,
    FLOAT_DTYPES,
    FORMATS,
    GGUF,
    GGUF_TYPES,
    KV_CACHES,
    RECIPES,
)
from qserve.command_line.setting import REQUIRED, check_settings, setting
from qserve.errors import LEAVE_OUT
from qserve.hub.settings import HubSettings


def bos_setting() -> bool:
    """Declare the field of --bos."""
    return setting(
        True,
        "start each window with the special tokens that the model's tokenizer adds (such as BOS); "
        "--no-bos: only windows that start a text",
    )


def eval_text_setting() -> str | None:
    """Declare the field of --eval-text."""
    return setting(
        None,
        "text file for the quality measurement, in windows of 1024 tokens; default: the package's "
        "held-out texts",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig(HubSettings):
    """Settings of `qserve quantize`."""

    output: str = setting(
        REQUIRED, "output folder; must be new or empty. With --format gguf: the file"
    )
    scheme: str = setting(
        "w4a16-sym",
        "data types of the linear layers, such as w4a16-sym, w8a8, fp8 (w8a8-fp8); for a GGUF "
        "file: " + ", ".join(GGUF_TYPES),
    )
    format: str | None = setting(
        None,
        "checkpoint format; default: the one that most servers can load for the scheme",
        (*FORMATS, GGUF),
    )
    recipe: str | None = setting(
        None,
        "quantization method; rtn: round to nearest, without data (default: awq+gptaq at 4 bits, "
        "but gptaq for --adapter, GGUF files and 4-bit floats; gptaq at 2 and 3 bits; gptq for "
        "models that run through transformers; smoothquant+gptq for w8a8; else rtn)",
        RECIPES,
    )
    target: str | None = setting(
        None,
        "only for draft heads: folder or hub name of the target model, whose hidden states"
        " calibrate the head",
    )
    calibration: str | None = setting(
        None,
        "calibration data: a plain text; JSON, JSON Lines or parquet with text or messages"
        " (messages may have images); or the name or folder of a data set (default: a"
        " small set in the package)",
    )
    samples: int = setting(128, "number of calibration windows", low=1)
    sequence_length: int = setting(2048, "length of a calibration window in tokens", low=2)
    quantize_head: str | None = setting(
        None,
        "also quantize the output head, to a scheme such as w8a16-sym; a tied head is then stored "
        "separately from the embedding",
    )
    quantize_embedding: str | None = setting(
        None,
        "also quantize the input embedding, and the head if it is tied, to a scheme such as "
        "w8a16-sym (compressed-tensors only)",
    )
    kv_cache_scheme: str | None = setting(
        None,
        "also write scales for an 8-bit KV cache (compressed-tensors only)",
        tuple(KV_CACHES),
    )
    kv_per_head: bool = setting(
        False, "with --kv-cache-scheme: one scale per KV head (vLLM needs FlashAttention 3)"
    )
    moe_calibrate_all_experts: bool = setting(
        False,
        "for mixtures of experts: every expert collects statistics of all tokens, not only of "
        "those routed to it; slower",
    )
    seed: int = setting(
        0, "seed for the order of the texts, and for the rotations of --recipe rotate"
    )
    bos: bool = bos_setting()
    eval_text: str | None = eval_text_setting()
    quality_windows: int = setting(
        4,
        "number of held-out windows of 512 tokens on which the quantized model is compared with "
        "the float model, for quality.json and the model card; 0: skip",
        low=0,
    )
    adapter: str | None = setting(
        None,
        "LoRA adapter (PEFT folder or hub name) to apply during calibration; only the base model"
        " is quantized",
    )
    spill: str | None = setting(
        None, "folder to keep the hidden states of the calibration data in, to save memory"
    )
    group_size: int | str | None = setting(
        None,
        "number of inputs that share a scale; -1: one scale per output; auto: the largest "
        "of 128, 64 and 32 that divides every linear (default: 128, or auto if 128 would "
        "leave over a tenth of the weights in float)",
    )
    device: str = setting(
        "auto",
        "where to compute; auto: the GPU if there is one; all: every visible GPU; or a list "
        "such as cuda:0,cuda:1",
    )
    bits: float | None = setting(
        None,
        "mean number of bits per weight, scales included: each linear gets 2 to 8 bits, depending "
        "on its sensitivity on the calibration data (compressed-tensors only)",
        low=2,
        high=9,
    )
    config: str | None = setting(
        None, "recipe file (YAML) with these settings; the command line takes precedence"
    )
    act_order: bool = setting(
        False,
        "group inputs of similar magnitude and store a group index (gptq only): more accurate, "
        "but slower, and rejected by vLLM 0.33",
    )
    ignore: list[str] = setting(
        [],
        "keep a linear in float if its name contains this text or matches this glob or "
        "re:EXPRESSION; may be repeated",
    )
    override: list[str] = setting(
        [], "PATTERN=SCHEME: use another scheme for some linears; may be repeated"
    )
    pad: bool = setting(
        False,
        "pad the feed-forward layers with zeros if their size is not a multiple of the group size",
    )
    max_shard_size: str = setting("2GB", "maximum size of one weight file, such as 500MB")

    def __post_init__(self) -> None:
        check_settings(self)
        if isinstance(self.group_size, str) and self.group_size != AUTO_GROUPS:
            raise InputError(
                "--group-size",
                f"expected a number or {AUTO_GROUPS}, found {self.group_size!r}",
                LEAVE_OUT,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig(HubSettings):
    """Settings of `qserve convert`, besides the source."""

    output: str = setting(
        REQUIRED,
        "output folder; must be new or empty. With --format gguf: the file",
        positional=True,
    )
    format: str = setting(
        REQUIRED,
        "checkpoint format; float: a folder of floats, as if the model had never been quantized",
        (*FORMATS, GGUF, FLOAT),
    )
    dtype: str | None = setting(
        None, "with --format float: dtype of all floats; default: that of config.json", FLOAT_DTYPES
    )
    max_shard_size: str = setting("2GB", "maximum size of one weight file, such as 500MB")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """Settings of `qserve generate`, besides the engine's."""

    prompt: list[str] = setting(
        REQUIRED, "text to complete, or with --chat the user's message; may be repeated"
    )
    chat: bool = setting(False, "apply the model's chat template")
    max_tokens: int = setting(128, "maximum number of tokens to generate")
    temperature: float = setting(0.0, "sampling temperature; 0: always the most likely token")
    top_p: float = setting(1.0, "sample from the most likely tokens with this total probability")
    top_k: int = setting(0, "sample from this many most likely tokens; 0: from all")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Settings of `qserve complete`, and with more of `qserve chat`."""

    url: str = setting("http://127.0.0.1:8000/v1", "URL of the server, up to its /v1")
    model_name: str | None = setting(None, "name of the model; default: the server's first")
    api_key: str | None = setting(
        None,
        "API key of the server; default: QSERVE_API_KEY or OPENAI_API_KEY from the environment",
    )
    quick: str | None = setting(None, "answer this one text, then exit")
    max_tokens: int | None = setting(
        None, "maximum number of tokens in an answer; default: the server's", low=1
    )
    temperature: float | None = setting(
        None, "sampling temperature; default: the server's", low=0, high=2
    )
    top_p: float | None = setting(
        None, "nucleus sampling probability; default: the server's", low=0, high=1
    )
    seed: int | None = setting(None, "seed for reproducible answers, if the server supports it")
    stats: bool = setting(False, "print the time to the first token and the tokens per second")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig(ClientConfig):
    """Settings of `qserve chat`."""

    system_prompt: str | None = setting(None, "system message at the start of a chat")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Settings of `qserve run-batch`, besides the engine's."""

    input: str = setting(REQUIRED, "input file with one request per line, in OpenAI's batch format")
    output: str = setting(
        REQUIRED,
        "output file for the answers, in order of completion; an existing file is replaced",
    )
    served_model_name: list[str] = setting(
        [],
        "model names that requests may use; default: MODEL as typed, without a revision",
        many=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Settings of `qserve eval`, besides the engine's."""

    text: str = setting(
        REQUIRED,
        "file to measure on: plain text, or JSON, JSON Lines or parquet with a text field; for "
        "vision-language models also chats with images, as for `quantize --calibration`",
    )
    against: str | None = setting(
        None,
        "another model in any format, such as the float model: also measure its perplexity, the "
        "KL divergence from it, and how often the most likely tokens agree",
    )
    sequence_length: int = setting(1024, "length of a window in tokens", low=2)
    windows: int | None = setting(
        None, "number of windows; default: as many as the file fills", low=1
    )
    bos: bool = setting(
        True,
        "start each window with the special tokens that the model's tokenizer adds (such as BOS); "
        "--no-bos: only windows that start a text",
    )
    json: bool = setting(False, "print the result as JSON")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamiliesConfig:
    """Settings of `qserve families`."""

    json: bool = setting(False, "print the table as JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectConfig(HubSettings):
    """Settings of `qserve inspect`, besides the folder."""

    json: bool = setting(False, "print the findings as JSON")
    deep: str | None = setting(
        None, "float model (folder or hub name): load both models and compare their logits"
    )
