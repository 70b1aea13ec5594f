"""Settings, each one a field, a flag and its documentation. Loads no torch.

A field `max_num_seqs` is the flag `--max-num-seqs`; its help text stands in the field's metadata.
Names follow vLLM where the meaning is the same.
"""

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from formats.errors import InputError
from formats.names import FORMATS, KV_CACHES, RECIPES
from qserve.logs import FORMATS as LOG_FORMATS
from qserve.logs import LEVELS
from qserve.output_parsing.output_parser import TOOL_PARSERS
from qserve.output_parsing.reasoning import REASONING_PARSERS

DTYPES = ("auto", "bfloat16", "float16", "float32")
LOAD_FORMATS = ("auto", "dummy")
DEVICES = ("auto", "cuda", "cpu")
KV_CACHE_DTYPES = ("auto", *KV_CACHES)
KERNEL_OPERATIONS = ("w4a16", "w8a16", "w8a8", "experts", "attention")

PREFIXES = ("qserve", "vllm")

REQUIRED = MISSING  # as a default: the flag must be given


def setting(
    default: Any,
    help: str,
    choices: tuple[str, ...] | None = None,
    *,
    positional: bool = False,
    many: bool = False,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag, or an argument without one.

    A list is a flag that may be repeated, and with `many` takes several values at once. `low` and
    `high` are the ends of a number's range.
    """
    metadata = {"help": help, "choices": choices, "positional": positional, "many": many}
    metadata |= {"low": low, "high": high}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_settings(config: object) -> None:
    """Raise InputError for a setting that is none of its choices, or outside of its range."""
    for each in fields(config):
        value, allowed = getattr(config, each.name), each.metadata
        flag = f"--{each.name.replace('_', '-')}"
        if value is None or not allowed:
            continue
        if allowed["choices"] is not None and value not in allowed["choices"]:
            raise InputError(
                flag, f"expected one of {', '.join(allowed['choices'])}, found {value!r}"
            )
        low, high = allowed["low"], allowed["high"]
        if low is not None and not low <= value <= (math.inf if high is None else high):
            expected = f"{low} or more" if high is None else f"{low} to {high}"
            raise InputError(flag, f"expected {expected}, found {value}")


def check_key(source: str, key: str) -> None:
    """Raise InputError for an API key that no client can send; the error does not show it."""
    # HTTP drops white space at the ends of a header.
    if not key or key != key.strip():
        raise InputError(source, "expected a key without white space at its ends")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that the engine is told. Raises InputError, also where Python code makes one."""

    model: str  # the model folder; a positional argument on the command line
    dtype: str = setting(
        "auto", "activation dtype; auto: the checkpoint's on a GPU, float32 on a CPU", DTYPES
    )
    device: str = setting("auto", "where to run; auto: the GPU if there is one", DEVICES)
    max_model_len: int | None = setting(
        None, "longest prompt plus output, in tokens; default: the model's own limit"
    )
    max_num_seqs: int = setting(256, "most requests in one step", low=1)
    max_num_batched_tokens: int = setting(
        8192,
        "token budget of one step; smaller: steadier inter-token times, larger: throughput",
        low=1,
    )
    gpu_memory_utilization: float = setting(
        0.9, "share of the GPU's memory for weights, activations and KV pages", low=0, high=1
    )
    block_size: int = setting(16, "tokens of one KV page", low=1)
    kv_cache_dtype: str = setting(
        "auto",
        "what KV pages hold; auto: 8 bits if the checkpoint was calibrated for them, else --dtype;"
        " int8, fp8: half the memory, scales found on write where the checkpoint has none",
        KV_CACHE_DTYPES,
    )
    kv_cache_memory: float | None = setting(
        None,
        "GiB for KV pages, in place of what --gpu-memory-utilization leaves",
        low=0,
        high=2**20,
    )
    num_gpu_blocks_override: int | None = setting(
        None, "number of KV pages, in place of what the memory allows", low=1
    )
    cpu_kv_cache_memory: float = setting(
        1.0, "GiB for KV pages when running on a CPU", low=0, high=2**20
    )
    cpu_threads: int | None = setting(
        None,
        "threads that compute on a CPU; default: OMP_NUM_THREADS where it is set, else one for each"
        " core, of which `serve` leaves one to HTTP",
        low=1,
    )
    enable_prefix_caching: bool = setting(
        True, "keep KV pages of finished requests for others that begin with the same tokens"
    )
    kv_offload_gb: float = setting(
        0.0,
        "GiB of the host's memory for KV pages that the device has no room for any more",
        low=0,
        high=2**20,
    )
    scheduling_policy: str = setting(
        "fcfs",
        "who is computed next: fcfs, priority (a request's field, lower first), prefill-first,"
        " longest-prefix, controlled (one phase at a time), or module:Class with your own",
    )
    prefill_batch_size: int = setting(
        1, "prompts that --scheduling-policy controlled computes together", low=1
    )
    target_itl_ms: float | None = setting(
        None,
        "milliseconds from a token to its next that prompts must not make longer: they are cut into"
        " chunks that fit",
        low=0.1,
    )
    enforce_eager: bool = setting(False, "never use CUDA graphs")
    max_seq_len_to_capture: int | None = setting(
        None,
        "longest context that runs in CUDA graphs; beyond it steps are launched kernel by kernel;"
        " default: --max-model-len",
        low=1,
    )
    async_scheduling: bool = setting(
        True, "plan a step while the one before it runs on the GPU; off: one after the other"
    )
    compile_processes: int | None = setting(
        None,
        "processes that compile kernels at the start; 0: none; default: one for each core, 16 at"
        " most",
        low=0,
        high=256,
    )
    kernel: list[str] = setting(
        [],
        "OP=NAME asks for a kernel, OP=-NAME forbids it; OP is w4a16, w8a16, w8a8, experts or"
        " attention; NAME as qkernels/README.md lists them; may be repeated",
    )
    load_format: str = setting(
        "auto", "dummy: random weights in the shapes that config.json states", LOAD_FORMATS
    )
    seed: int = setting(
        0, "seed of requests that give none, and of dummy weights", low=-(2**63), high=2**63 - 1
    )

    def __post_init__(self) -> None:
        check_settings(self)
        _ = self.kernels  # raises where a choice cannot be read

    @property
    def kernels(self) -> dict[str, str]:
        """Operation -> the kernels asked for and forbidden, as ops take them."""
        found: dict[str, str] = {}
        for each in self.kernel:
            operation, equals, name = each.partition("=")
            if not (equals and name) or operation not in KERNEL_OPERATIONS:
                raise InputError(
                    "--kernel",
                    f"expected OP=NAME with one of {', '.join(KERNEL_OPERATIONS)}, found {each!r}",
                )
            found[operation] = ",".join(filter(None, (found.get(operation), name)))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything that the HTTP server is told."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = setting(8000, "port to listen on; 0: any free one", low=0, high=2**16 - 1)
    uds: str | None = setting(None, "Unix socket to listen on, in place of --host and --port")
    root_path: str = setting("", "path under which a proxy offers this server, such as /llm")
    ssl_certfile: str | None = setting(None, "PEM file of the certificate: serve HTTPS")
    ssl_keyfile: str | None = setting(
        None, "PEM file of its key; default: the certificate's file has it"
    )
    ssl_ca_certs: str | None = setting(
        None, "PEM file of authorities: only clients with a certificate of theirs are answered"
    )
    allowed_origins: list[str] = setting(
        [], "origins whose pages may call this server (CORS), or *; default: none", many=True
    )
    allow_credentials: bool = setting(False, "let these pages send cookies and certificates")
    served_model_name: list[str] = setting(
        [],
        "names that clients may give, the first of which replies state; default: the model"
        " folder as typed",
        many=True,
    )
    api_key: list[str] = setting(
        [],
        "require one of these keys as a Bearer token on every route but /health, /ready, /ping",
        many=True,
    )
    api_key_file: str | None = setting(None, "file with a key in each line; # begins a comment")
    api_key_env: str = setting(
        "QSERVE_API_KEY", "environment variable with keys, parted by commas, if it is set"
    )
    max_requests_per_minute: int | None = setting(
        None, "requests that a key (without keys, an address) may send a minute; more: 429", low=1
    )
    request_timeout: float | None = setting(
        None,
        "seconds that an answer may take; longer: 408. Clients can ask for less by the header"
        " X-Request-Timeout",
        low=0.001,
    )
    shutdown_timeout: float = setting(
        10.0, "seconds that running requests get to finish after SIGTERM", low=0
    )
    log_level: str = setting("info", "least level of log lines", LEVELS)
    log_format: str = setting("text", "form of log lines", LOG_FORMATS)
    metrics_prefix: str = setting(
        "qserve", "prefix of the metrics' names; vllm: dashboards made for vLLM work", PREFIXES
    )
    max_num_queued_reqs: int = setting(
        2048, "outputs that may wait beyond --max-num-seqs; more get 503 until some are done", low=0
    )
    max_num_queued_tokens: int = setting(
        2**22,
        "tokens of all prompts, once for each output, that may be under way; beyond: 503",
        low=0,
    )
    max_body_bytes: int = setting(8 * 2**20, "longest body of a request; longer: 413", low=1)
    max_connections: int | None = setting(
        None,
        "most open connections; beyond, the longest idle one is closed, else 503; default: what"
        " the limit of file descriptors allows",
        low=1,
    )
    engine_timeout: float = setting(
        60.0, "seconds without a sign of life after which the engine counts as dead", low=1
    )
    engine_step_timeout: float = setting(
        600.0, "seconds that one step may take before the engine counts as dead", low=1
    )
    restart_engine: int = setting(
        0, "times that a dead engine is started again; meanwhile: 503 with Retry-After", low=0
    )
    cache_salt_by_key: bool = setting(
        False, "share KV pages of equal prompts only between requests with the same API key"
    )
    enable_cache_reset: bool = setting(
        False, "let clients empty the prefix cache: POST /reset_prefix_cache"
    )
    chat_special_tokens: bool = setting(
        False,
        "let the text of chat messages make control tokens such as <|im_end|>; for trusted"
        " clients only",
    )
    enable_auto_tool_choice: bool = setting(
        False, "let the model choose whether to call tools (tool_choice: auto)"
    )
    tool_call_parser: str | None = setting(
        None,
        "how the model writes calls of tools, with --enable-auto-tool-choice",
        tuple(TOOL_PARSERS),
    )
    reasoning_parser: str | None = setting(
        None,
        "how the model marks its reasoning, which chats then answer as reasoning_content",
        tuple(REASONING_PARSERS),
    )

    def __post_init__(self) -> None:
        check_settings(self)
        for key in self.api_key:
            check_key("--api-key", key)
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise InputError(
                "--enable-auto-tool-choice",
                "expected with --tool-call-parser",
                f"name how the model writes calls: {', '.join(TOOL_PARSERS)}",
            )
        if self.root_path and (not self.root_path.startswith("/") or self.root_path[-1] == "/"):
            raise InputError(
                "--root-path", f"expected / at the start alone, found {self.root_path!r}"
            )

    @property
    def auto_tool_parser(self) -> str | None:
        """The parser of calls that a model chooses to make; None: it may not."""
        return self.tool_call_parser if self.enable_auto_tool_choice else None

    def model_names(self, folder: str) -> tuple[str, ...]:
        """What clients call the model of a folder."""
        return tuple(self.served_model_name) or (folder,)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    """What `qserve quantize` is told beside the model."""

    output: str = setting(REQUIRED, "folder to write; must not exist or be empty")
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
    calibration: str | None = setting(
        None,
        "texts for calibration: .txt, .jsonl with text or messages, .parquet, or a data set's name"
        " or folder (default: a small set that the package brings)",
    )
    samples: int = setting(128, "calibration windows")
    sequence_length: int = setting(2048, "tokens of a calibration window")
    kv_cache_scheme: str | None = setting(
        None,
        "also write the scales of an 8-bit KV cache (compressed-tensors only)",
        tuple(KV_CACHES),
    )
    seed: int = setting(0, "seed of the order of the texts, and of rotations")
    eval_text: str | None = setting(
        None, "file to measure perplexity on, before and after, in windows of 1024 tokens"
    )
    spill: str | None = setting(None, "folder for the data's hidden states, to spare memory")
    group_size: int | None = setting(
        None, "inputs that share a scale; -1: one scale for each output (default: 128)"
    )
    device: str = setting("auto", "where to compute; auto: the GPU if there is one", DEVICES)
    bits: float | None = setting(
        None,
        "mean bits per weight, scales included: each linear gets 2 to 8 by what the data says that"
        " it needs (compressed-tensors)",
    )
    config: str | None = setting(
        None, "recipe file (YAML) with these settings; flags that are given go before it"
    )
    ignore: list[str] = setting(
        [],
        "leave linears in float whose name has this part, fits this glob or re:EXPRESSION;"
        " may be given again",
    )
    override: list[str] = setting(
        [], "PATTERN=SCHEME: another scheme for some linears; may be given again"
    )
    pad: bool = setting(
        False, "widen the feed-forward with zeros where its size does not fit the groups"
    )
    max_shard_size: str = setting("2GB", "most bytes of one weight file, such as 500MB")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """What `qserve convert` is told beside the folder to read."""

    output: str = setting(REQUIRED, "folder to write; must not exist or be empty", positional=True)
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
    model_name: str | None = setting(None, "the model; default: the first that the server has")
    api_key: str | None = setting(
        None, "the server's key; default: the environment's QSERVE_API_KEY or OPENAI_API_KEY"
    )
    quick: str | None = setting(None, "answer this one text and end")
    system_prompt: str | None = setting(None, "what the system says before a chat")
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
    sequence_length: int = setting(1024, "tokens of a window")
    windows: int | None = setting(None, "number of windows; default: all that the file fills")
    json: bool = setting(False, "print the result as JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectConfig:
    """What `qserve inspect` is told beside the folder."""

    json: bool = setting(False, "print the findings as JSON")
    deep: str | None = setting(
        None, "a float model folder: load both models and compare their logits"
    )
