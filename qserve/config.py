"""Settings, each one a field, a flag and its documentation. Loads no torch.

A field `max_num_seqs` is the flag `--max-num-seqs`; its help text stands in the field's metadata.
Names follow vLLM where the meaning is the same.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from formats.errors import InputError
from formats.names import KV_CACHES
from qserve.kv_transfer.config import KvTransferConfig
from qserve.logs import FORMATS as LOG_FORMATS
from qserve.logs import LEVELS
from qserve.lora.request import MAX_RANK, parse_modules
from qserve.output_parsing.output_parser import TOOL_PARSERS
from qserve.output_parsing.reasoning import REASONING_PARSERS
from qserve.profile.profiler_config import ProfilerConfig
from qserve.setting import check_key, check_settings, setting
from qserve.speculation.config import SpeculativeConfig

DTYPES = ("auto", "bfloat16", "float16", "float32")
LOAD_FORMATS = ("auto", "dummy")
DEVICES = ("auto", "cuda", "cpu")
EXECUTORS = ("mp", "ray")
ALL_REDUCES = ("auto", "nccl")
KV_CACHE_DTYPES = ("auto", *KV_CACHES)
KERNEL_OPERATIONS = ("w4a16", "w8a16", "w8a8", "experts", "attention")

PREFIXES = ("qserve", "vllm")


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
    tensor_parallel_size: int = setting(
        1, "GPUs that each layer is split over; on a CPU, processes", low=1, high=64
    )
    pipeline_parallel_size: int = setting(
        1, "stages that the layers are split into, each on its own GPUs", low=1, high=64
    )
    distributed_executor_backend: str = setting(
        "mp",
        "who starts the ranks of such a model; mp: processes on this machine, ray: actors in a"
        " cluster",
        EXECUTORS,
    )
    all_reduce: str = setting(
        "auto",
        "how GPUs add up their parts; auto: through each other's memory where they reach it",
        ALL_REDUCES,
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
    num_state_snapshots: int = setting(
        32,
        "for models whose layers have states: copies of states on the device, from which requests"
        " with the same beginning start; 0: none are reused",
        low=0,
        high=2**20,
    )
    enable_prefix_caching: bool = setting(
        True, "keep KV pages of finished requests for others that begin with the same tokens"
    )
    kv_offload_gb: float = setting(
        0.0,
        "GiB of the host's memory for KV pages for which the device has no more room",
        low=0,
        high=2**20,
    )
    kv_transfer_config: str | None = setting(
        None,
        'exchange KV pages with other engines: {"kv_connector": "folder",'
        ' "kv_connector_extra_config": {"path": DIR, "max_gb": 16}}, with "kv_role" kv_both,'
        " kv_producer or kv_consumer; or module:Class with your own connector",
    )
    scheduling_policy: str = setting(
        "fcfs",
        "which request is computed next: fcfs, priority (a request's field, lower first),"
        " prefill-first,"
        " longest-prefix, controlled (one phase at a time), or module:Class with your own",
    )
    prefill_batch_size: int = setting(
        1, "prompts that --scheduling-policy controlled computes together", low=1
    )
    target_itl_ms: float | None = setting(
        None,
        "milliseconds from one token to the next; prompts are cut into chunks so that they do not"
        " exceed it",
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
        "OP=NAME requests a kernel, OP=-NAME forbids it; OP is w4a16, w8a16, w8a8, experts or"
        " attention; NAME as qkernels/README.md lists them; may be repeated",
    )
    enable_lora: bool = setting(False, "serve LoRA adapters beside the model")
    lora_modules: list[str] = setting(
        [],
        'adapters that PEFT saved, NAME=FOLDER or {"name": NAME, "path": FOLDER}; requests choose'
        " one by giving its name as the model's",
        many=True,
    )
    max_loras: int = setting(4, "most adapters on the device, and so in one step", low=1)
    max_lora_rank: int = setting(16, "largest rank of an adapter", low=1, high=MAX_RANK)
    max_cpu_loras: int | None = setting(
        None,
        "most adapters in the host's memory; others are read again; default: 4 times --max-loras",
        low=1,
    )
    speculative_config: str | None = setting(
        None,
        'draft tokens and verify several in a step: {"method": "ngram",'
        ' "num_speculative_tokens": 4}, or suffix, mtp, or with "model": FOLDER draft_model, eagle,'
        " eagle3, medusa; keys as vLLM's",
    )
    spec_acceptance: str = setting(
        "exact",
        "which drafts become output; exact: those that leave the text as it would be without them;"
        " rejection: more of them where tokens are sampled, from the same distribution; typical:"
        " Medusa's rule, from another distribution",
        ("exact", "rejection", "typical"),
    )
    load_format: str = setting(
        "auto", "dummy: random weights in the shapes that config.json states", LOAD_FORMATS
    )
    seed: int = setting(
        0, "seed of requests that give none, and of dummy weights", low=-(2**63), high=2**63 - 1
    )

    def __post_init__(self) -> None:
        check_settings(self)
        _ = self.speculation  # raises where it cannot be read
        _ = self.kernels  # raises where a choice cannot be read
        if self.kv_transfer is not None and not self.enable_prefix_caching:
            raise InputError(
                "--kv-transfer-config", "expected with the prefix cache, whose pages it exchanges"
            )
        if parse_modules(self.lora_modules) and not self.enable_lora:
            raise InputError("--lora-modules", "expected with --enable-lora", "give it, too")
        if self.num_cpu_loras < self.max_loras:
            raise InputError(
                "--max-cpu-loras",
                f"expected at least --max-loras ({self.max_loras}), found {self.max_cpu_loras}",
            )

    @property
    def num_cpu_loras(self) -> int:
        return 4 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    @property
    def kv_transfer(self) -> KvTransferConfig | None:
        """Raises InputError."""
        return self.kv_transfer_config and KvTransferConfig.parse(self.kv_transfer_config)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """What --speculative-config says. Raises InputError."""
        if self.speculative_config is None:
            return None
        return SpeculativeConfig.parse(self.speculative_config, self.spec_acceptance)

    @property
    def num_ranks(self) -> int:
        """Processes, each with a GPU, that compute one model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

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


def engine_config(subject: str, model: str, settings: Mapping[str, Any]) -> EngineConfig:
    """The settings of an engine as Python code gives them, some as dicts. Raises InputError."""
    unknown = settings.keys() - EngineConfig.__dataclass_fields__.keys()
    if unknown:
        raise InputError(f"{subject}({', '.join(sorted(unknown))})", "no such setting")
    texts = {
        name: json.dumps(settings[name])
        for name in ("speculative_config", "kv_transfer_config")
        if isinstance(settings.get(name), dict)
    }
    return EngineConfig(**{**settings, **texts, "model": str(model)})


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
        "names that clients may give; replies state the first; default: the model folder as typed",
        many=True,
    )
    api_key: list[str] = setting(
        [],
        "require one of these keys as a Bearer token on every route but /health, /ready, /ping",
        many=True,
    )
    api_key_file: str | None = setting(None, "file with one key per line; # begins a comment")
    api_key_env: str = setting(
        "QSERVE_API_KEY", "environment variable with keys, separated by commas, if it is set"
    )
    max_requests_per_minute: int | None = setting(
        None, "requests that a key (without keys, an address) may send a minute; more: 429", low=1
    )
    request_timeout: float | None = setting(
        None,
        "seconds that an answer may take; longer: 408. Clients can ask for less with the header"
        " X-Request-Timeout",
        low=0.001,
    )
    shutdown_timeout: float = setting(
        10.0, "seconds that running requests get to finish after SIGTERM", low=0
    )
    log_level: str = setting("info", "lowest level that is logged", LEVELS)
    log_format: str = setting("text", "format of log lines", LOG_FORMATS)
    otlp_traces_endpoint: str | None = setting(
        None, "where spans of requests go, by OTLP over HTTP, such as http://host:4318/v1/traces"
    )
    metrics_prefix: str = setting(
        "qserve", "prefix of the metrics' names; vllm: dashboards made for vLLM work", PREFIXES
    )
    max_num_queued_reqs: int = setting(
        2048,
        "outputs that may wait beyond --max-num-seqs; further ones get 503 until some are done",
        low=0,
    )
    max_num_queued_tokens: int = setting(
        2**22,
        "tokens of all prompts, once for each output, that may be under way; beyond: 503",
        low=0,
    )
    max_body_bytes: int = setting(8 * 2**20, "largest request body; larger: 413", low=1)
    max_connections: int | None = setting(
        None,
        "most open connections; beyond that, the one idle longest is closed, or else 503; default:"
        " what"
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
        0, "how often a dead engine is started again; meanwhile: 503 with Retry-After", low=0
    )
    cache_salt_by_key: bool = setting(
        False, "share KV pages of equal prompts only between requests with the same API key"
    )
    enable_cache_reset: bool = setting(
        False, "let clients empty the prefix cache: POST /reset_prefix_cache"
    )
    lora_folder: str | None = setting(
        None,
        "let clients load adapters from the folders in this one: POST /v1/load_lora_adapter,"
        " /v1/unload_lora_adapter; needs an API key",
    )
    profiler_config: str | None = setting(
        None,
        'let clients record steps (POST /start_profile, /stop_profile): {"profiler": "torch",'
        ' "torch_profiler_dir": DIR}, or "cuda" for nsys',
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
        _ = self.profiler  # raises where it cannot be read
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
    def profiler(self) -> ProfilerConfig | None:
        """Raises InputError."""
        return self.profiler_config and ProfilerConfig.parse(self.profiler_config)

    @property
    def auto_tool_parser(self) -> str | None:
        """The parser of calls that a model chooses to make; None: it may not."""
        return self.tool_call_parser if self.enable_auto_tool_choice else None

    def model_names(self, folder: str) -> tuple[str, ...]:
        """What clients call the model of a folder."""
        return tuple(self.served_model_name) or (folder,)
