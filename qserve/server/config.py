"""ServerConfig: settings of the HTTP server. A field defines the flag and its help text.

qserve/config.py does the same for the engine.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from formats.errors import InputError
from formats.files.model_path import gguf_name, is_mistral_folder
from formats.files.model_path import origin as origin_of
from formats.hub.name import served_name
from qserve.command_line.setting import check_key, check_settings, setting
from qserve.multimodal.settings import MediaSettings
from qserve.output_parsing.detection import AUTO, NONE
from qserve.output_parsing.reasoning_formats import REASONING_PARSERS
from qserve.output_parsing.tool_formats import TOOL_PARSERS
from qserve.processes.logs import FORMATS as LOG_FORMATS
from qserve.processes.logs import LEVELS
from qserve.profile.profiler_config import ProfilerConfig
from qserve.server.admin.settings import AdminSettings
from qserve.server.models.settings import ModelsSettings
from qserve.server.store.settings import StoreSettings

# vLLM's names of formats that have another name here
VLLM_TOOL_PARSERS = {
    "hunyuan_a13b": "hunyuan",
    "llama4_json": "llama3_json",
    "openai": "gpt_oss",
    "phi4_mini_json": "phi4_mini",
}
VLLM_REASONING_PARSERS = {"hunyuan_a13b": "hunyuan", "openai_gptoss": "gpt_oss"}
PREFIXES = ("qserve", "vllm")


ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")  # of a page, in the header Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(AdminSettings, MediaSettings, ModelsSettings, StoreSettings):
    """All settings of the HTTP server."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0: all")
    port: int = setting(8000, "port to listen on; 0: any free one", low=0, high=2**16 - 1)
    uds: str | None = setting(None, "Unix socket to listen on instead of --host and --port")
    check: bool = setting(
        True,
        "before serving, compare the scales and a few logits with those that `quantize` stored in "
        "the folder, if any, and refuse a model that differs",
    )
    root_path: str = setting(
        "", "path under which a reverse proxy exposes this server, such as /llm"
    )
    ssl_certfile: str | None = setting(None, "PEM file of the TLS certificate; enables HTTPS")
    ssl_keyfile: str | None = setting(
        None, "PEM file of the TLS key; default: read it from --ssl-certfile"
    )
    ssl_ca_certs: str | None = setting(
        None,
        "PEM file of CA certificates; clients must present a certificate that one of them signed",
    )
    allowed_origins: list[str] = setting(
        [], "origins whose web pages may call this server (CORS), or *; default: none", many=True
    )
    allowed_hosts: list[str] = setting(
        [],
        "additional values of the Host header to accept if no API key is set, such as"
        " llm.example.com, *.example.com, or * for all; always accepted: IP addresses, localhost,"
        " names without a dot, names in .local and .internal, the machine's own name, and --host",
        many=True,
    )
    allow_credentials: bool = setting(
        False, "let pages of --allowed-origins send cookies and client certificates"
    )
    served_model_name: list[str] = setting(
        [],
        "model names that requests may use; responses contain the first; default: MODEL as typed,"
        " without a revision",
        many=True,
    )
    api_key: list[str] = setting(
        [],
        "require one of these keys as a Bearer token on every route except /health, /ready, /ping",
        many=True,
    )
    api_key_file: str | None = setting(None, "file with one API key per line; # starts a comment")
    api_key_env: str = setting(
        "QSERVE_API_KEY", "environment variable with comma-separated API keys"
    )
    max_requests_per_minute: int | None = setting(
        None,
        "rate limit per API key, or per client address if there are no keys; further requests get"
        " 429; default: no limit",
        low=1,
    )
    request_timeout: float | None = setting(
        None,
        "seconds until a request fails with 408; clients can set a shorter time in the header"
        " X-Request-Timeout; default: no limit",
        low=0.001,
    )
    shutdown_timeout: float = setting(
        10.0, "seconds that running requests may take to finish after SIGTERM", low=0
    )
    log_level: str = setting("info", "lowest level of log messages to print", LEVELS)
    log_format: str = setting("text", "format of log lines", LOG_FORMATS)
    otlp_traces_endpoint: str | None = setting(
        None, "OTLP/HTTP endpoint for a trace span per request, such as http://host:4318/v1/traces"
    )
    metrics_prefix: str = setting(
        "qserve", "prefix of metric names; with vllm, dashboards made for vLLM work", PREFIXES
    )
    max_num_queued_reqs: int = setting(
        2048,
        "maximum number of outputs that wait while --max-num-seqs run; more are refused with 503",
        low=0,
    )
    max_num_queued_tokens: int = setting(
        2**22,
        "maximum number of prompt tokens of running and queued outputs; more are refused with 503",
        low=0,
    )
    max_body_bytes: int = setting(
        8 * 2**20, "largest request body in bytes; larger ones get 413", low=1
    )
    max_connections: int | None = setting(
        None,
        "maximum number of open connections; a further one closes the longest idle one or gets 503;"
        " default: derived from the limit of file descriptors",
        low=1,
    )
    engine_timeout: float = setting(
        60.0, "consider the engine dead after this many seconds without a message from it", low=1
    )
    engine_step_timeout: float = setting(
        600.0, "consider the engine dead if one step takes more than this many seconds", low=1
    )
    restart_engine: int = setting(
        0,
        "number of times to restart a dead engine; requests get 503 with Retry-After meanwhile",
        low=0,
    )
    cache_salt_by_key: bool = setting(
        False, "share cached prefixes only between requests with the same API key"
    )
    enable_cache_reset: bool = setting(
        False, "enable POST /reset_prefix_cache, which empties the prefix cache"
    )
    lora_folder: str | None = setting(
        None,
        "enable POST /v1/load_lora_adapter and /v1/unload_lora_adapter for the adapters in this"
        " folder; requires an API key",
    )
    profiler_config: str | None = setting(
        None,
        'enable POST /start_profile and /stop_profile, which record steps: {"profiler": "torch",'
        ' "torch_profiler_dir": DIR}, or "cuda" for nsys',
    )
    chat_special_tokens: bool = setting(
        False,
        "allow control tokens such as <|im_end|> in the text of chat messages, instead of refusing"
        " them; only for trusted clients",
    )
    enable_auto_tool_choice: bool = setting(
        True,
        "allow tool_choice: auto, where the model chooses whether to call tools; requires a"
        " --tool-call-parser",
    )
    tool_call_parser: str | None = setting(
        AUTO,
        "format of the model's tool calls; auto: from its chat template and config; none: unknown",
        (AUTO, NONE, *TOOL_PARSERS),
        aliases=VLLM_TOOL_PARSERS,
    )
    structured_output_strict: bool = setting(
        False,
        "refuse JSON schemas with keywords that cannot be enforced; by default such a keyword is"
        " ignored and named in the header x-warnings",
    )
    reasoning_parser: str | None = setting(
        AUTO,
        "format of the model's reasoning, which chat responses return as reasoning_content; auto:"
        " from its chat template and config; none: reasoning is content",
        (AUTO, NONE, *REASONING_PARSERS),
        aliases=VLLM_REASONING_PARSERS,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        _ = self.profiler  # raises if it is invalid
        _ = self.media_limits  # raises if one is invalid
        for key in self.api_key:
            check_key("--api-key", key)
        for origin in self.allowed_origins:
            if not ORIGIN.fullmatch(origin):
                raise InputError(
                    "--allowed-origins",
                    f"expected an origin as browsers send it, found {origin!r}",
                    "write SCHEME://HOST or SCHEME://HOST:PORT, without a path, or * for all",
                )
        if self.root_path and (not self.root_path.startswith("/") or self.root_path[-1] == "/"):
            raise InputError(
                "--root-path",
                f"expected a path with / at its start and not at its end, found {self.root_path!r}",
                "write it as /v2",
            )

    @property
    def profiler(self) -> ProfilerConfig | None:
        """Parsed --profiler-config. Raises InputError."""
        return self.profiler_config and ProfilerConfig.parse(self.profiler_config)

    def model_names(self, folder: str) -> tuple[str, ...]:
        """Names under which clients address the model of a folder or hub name."""
        if is_mistral_folder(Path(folder)):
            folder = str(origin_of(folder))
        return tuple(self.served_model_name) or (gguf_name(folder) or served_name(folder),)
