"""Settings of the engine. Each field is a flag and has its documentation.

The field `max_num_seqs` is the flag `--max-num-seqs`. The field's metadata hold its help text.
Names are those of vLLM where the meaning is the same. The module does not import torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.errors import InputError
from formats.files.model_path import is_foreign, model_folder
from formats.names import KV_CACHES
from qserve.command_line.setting import check_settings, setting
from qserve.hub.settings import HubSettings
from qserve.kv_transfer.config import KvTransferConfig
from qserve.lora.request import MAX_RANK, parse_modules
from qserve.model.loading.online_quantization import OnlineQuantization
from qserve.parallel.settings import ParallelSettings
from qserve.server.config import ServerConfig
from qserve.speculation.config import SpeculativeConfig

__all__ = ["EngineConfig", "ServerConfig", "engine_config"]

DTYPES = ("auto", "bfloat16", "float16", "float32")
LOAD_FORMATS = ("auto", "dummy")
DEVICES = ("auto", "cuda", "cpu")
MODEL_IMPLS = ("auto", "native", "transformers")
KV_CACHE_DTYPES = ("auto", *KV_CACHES, "int4")
KERNEL_OPERATIONS = ("w4a16", "w8a16", "w8a8", "w4a8", "experts", "attention")
# --batch-invariant selects the kernels of this name for these operations. "float": linears that
# are not quantized. "states": recurrent states and causal convolutions.
FIXED_ORDER = "fixed_order"
FIXED_ORDER_OPERATIONS = (
    *(f"w{bits}a16" for bits in (2, 3, 4, 6, 8)),
    "w8a8",
    "w4a8",
    "experts",
    "attention",
    "states",
    "float",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(HubSettings, ParallelSettings):
    """The engine's settings. Raises InputError for invalid values."""

    # The model's folder, GGUF file or hub name; a positional argument on the command line.
    model: str
    tokenizer: str | None = setting(
        None, "folder or hub name of the tokenizer and chat template; default: MODEL"
    )
    dtype: str = setting(
        "auto",
        "activation dtype; auto: the checkpoint's on a GPU, float32 on a CPU",
        DTYPES,
        aliases={"half": "float16", "float": "float32"},
    )
    device: str = setting("auto", "where to run; auto: the GPU if there is one", DEVICES)
    model_impl: str = setting(
        "auto",
        "implementation of the layers; native: this project's; transformers: those of transformers"
        " over this project's KV pages; auto: transformers for architectures that `qserve families`"
        " does not list",
        MODEL_IMPLS,
        aliases={"vllm": "native"},
    )
    max_model_len: int | None = setting(
        None,
        "maximum length of prompt plus output, in tokens; default, also auto or -1: the model's "
        "own limit, or what the KV cache holds",
        aliases={"auto": None, "-1": None},
    )
    max_num_seqs: int = setting(256, "maximum number of requests in one step", low=1)
    max_num_batched_tokens: int = setting(
        8192,
        "token budget of one step; smaller values make the inter-token latency steadier, larger "
        "ones raise throughput",
        low=1,
    )
    gpu_memory_utilization: float = setting(
        0.9, "fraction of the GPU's memory for weights, activations and KV pages", low=0, high=1
    )
    block_size: int = setting(16, "number of tokens in one KV page", low=1)
    kv_cache_dtype: str = setting(
        "auto",
        "data type of KV pages; auto: 8 bits if the checkpoint was calibrated for them, "
        "else --dtype; int8, fp8: half the memory, with scales computed at write time if "
        "the checkpoint has none; int4: half the memory of int8 at a loss of accuracy, which "
        "`qserve eval` measures",
        KV_CACHE_DTYPES,
        aliases={"fp8_e4m3": "fp8"},
    )
    kv_cache_memory: float | None = setting(
        None,
        "GiB for KV pages; overrides --gpu-memory-utilization",
        low=0,
        high=2**20,
    )
    num_gpu_blocks_override: int | None = setting(
        None, "number of KV pages; overrides the number that fits into memory", low=1
    )
    cpu_kv_cache_memory: float = setting(
        1.0, "GiB for KV pages when running on a CPU", low=0, high=2**20
    )
    cpu_threads: int | None = setting(
        None,
        "number of CPU threads for the model; default: OMP_NUM_THREADS if set, else one per core "
        "(`serve` leaves one core to HTTP)",
        low=1,
    )
    num_state_snapshots: int | None = setting(
        None,
        "for models with recurrent layers: number of state snapshots on the device, which let "
        "requests reuse a common prefix; default: as many as fit into a quarter of the memory for "
        "KV pages, at most one per 256 tokens of KV pages; 0: no reuse",
        low=0,
        high=2**20,
    )
    enable_prefix_caching: bool = setting(
        True, "keep the KV pages of finished requests for later requests with the same prefix"
    )
    kv_offload_gb: float = setting(
        0.0,
        "GiB of host memory for KV pages that are evicted from the device",
        low=0,
        high=2**20,
    )
    kv_transfer_config: str | None = setting(
        None,
        'exchange KV pages with other engines, as JSON: {"kv_connector": "folder", '
        '"kv_connector_extra_config": {"path": DIR, "max_gb": 16}}; other connectors: peer (from '
        "GPU to GPU on one host), nixl (between hosts), or module:Class of your own; kv_role: "
        "kv_both, kv_producer or kv_consumer",
    )
    scheduling_policy: str = setting(
        "fcfs",
        "which request is computed next: fcfs, priority (by the request's priority, lower "
        "first), prefill-first, longest-prefix, controlled (one phase at a time), or "
        "module:Class for a policy of your own",
    )
    admission: str = setting(
        "forecast",
        "when a waiting request starts; forecast: when the KV pages are predicted to last until "
        "the running requests end, from the lengths of earlier outputs; fits: as soon as its "
        "prompt fits",
        ("forecast", "fits"),
    )
    prefill_batch_size: int = setting(
        1, "number of prompts that --scheduling-policy controlled computes together", low=1
    )
    target_itl_ms: float | None = setting(
        None,
        "target inter-token latency in milliseconds; prompts are split into chunks small "
        "enough to meet it; default: no target",
        low=0.1,
    )
    batch_invariant: bool = setting(
        False,
        "make the output of a request bit-identical in any batch, and with any prompt chunks, "
        "prefix-cache hits, preemption or drafts; a little slower",
    )
    enforce_eager: bool = setting(False, "never use CUDA graphs")
    language_model_only: bool = setting(
        False, "do not load the vision tower of a vision-language model: text only"
    )
    mm_encoder_quantization: str | None = setting(
        None,
        "quantize the linear layers of the vision tower to int8 or float8 while it loads",
        ("w8a8", "w8a8-fp8"),
    )
    max_seq_len_to_capture: int | None = setting(
        None,
        "longest context for CUDA graphs; steps with longer contexts run without graphs; default: "
        "--max-model-len",
        low=1,
    )
    async_scheduling: bool = setting(
        True, "plan the next step while the current one runs on the GPU; off: plan it afterwards"
    )
    compile_processes: int | None = setting(
        None,
        "number of processes that compile kernels at startup; 0: none; default: one per "
        "core, at most 16",
        low=0,
        high=256,
    )
    plain_kernel_launch: bool = setting(
        False,
        "launch every kernel through Triton instead of qserve's own launcher; slower; use it to"
        " check whether the launcher causes a fault",
    )
    kernel: list[str] = setting(
        [],
        "OP=NAME selects a kernel, OP=-NAME excludes it; OP is w4a16, w8a16, w8a8, w4a8, experts "
        "or attention; qkernels/README.md lists the kernels; may be repeated",
    )
    enable_lora: bool = setting(False, "serve LoRA adapters along with the model")
    lora_modules: list[str] = setting(
        [],
        'adapters saved by PEFT, as NAME=FOLDER or {"name": NAME, "path": FOLDER}, where FOLDER '
        "may be a hub name; a request selects one by its name in the field model",
        many=True,
    )
    max_loras: int = setting(
        4, "maximum number of adapters on the device, and so in one step", low=1
    )
    max_lora_rank: int = setting(16, "maximum rank of an adapter", low=1, high=MAX_RANK)
    lora_experts: bool = setting(
        False,
        "also serve adapters of routed experts; every adapter slot then has room for all experts",
    )
    max_cpu_loras: int | None = setting(
        None,
        "maximum number of adapters in host memory; requests for others read them from disk; "
        "default: 4 times --max-loras",
        low=1,
    )
    speculative_config: str | None = setting(
        None,
        'speculative decoding, with the keys of vLLM: {"method": "ngram", '
        '"num_speculative_tokens": 4}; methods without another model: ngram, suffix, mtp; with '
        '"model" (FOLDER or hub name): draft_model, eagle, eagle3, peagle, medusa, dflash, dspark',
    )
    spec_acceptance: str = setting(
        "exact",
        "which drafts are accepted; exact: drafts equal to the tokens sampled without drafts, so "
        "the text is the same; rejection: rejection sampling, which accepts more drafts and keeps "
        "the distribution; typical: Medusa's rule, which changes the distribution",
        ("exact", "rejection", "typical"),
    )
    activation_bits: int | None = setting(
        None,
        "run a checkpoint for 4-bit activations (W4A4) with 8-bit or 16-bit activations, which"
        " changes its outputs a little; without this flag, such a checkpoint is refused",
        (8, 16),
    )
    quantization: str | None = setting(
        None,
        "quantize the linear layers of a float checkpoint while it loads: w4a16, w8a16, w8a8, fp8"
        " or another scheme of `quantize --scheme` that needs no calibration; w4a16-auto: with the"
        " largest groups that fit",
    )
    quantization_config: str | None = setting(
        None,
        'exceptions to --quantization: {"ignore": [PATTERN, ...], "targets": {PATTERN: SCHEME}}; '
        'with --quantization online also {"linear": SCHEME, "moe": SCHEME}',
    )
    lm_head_quantization: str | None = setting(
        None,
        "round a float output head to 8 or 4 bits while it loads; a decode step of few requests"
        " reads the whole head, so it becomes faster; 8 bits change the outputs very little",
        ("w8a16", "w4a16"),
    )
    load_format: str = setting(
        "auto",
        "auto: read the weights from the model's files; dummy: random weights in the shapes that"
        " config.json gives",
        LOAD_FORMATS,
        aliases=dict.fromkeys(("safetensors", "gguf", "bitsandbytes", "mistral"), "auto"),
    )
    seed: int = setting(
        0, "seed for requests without one, and for dummy weights", low=-(2**63), high=2**63 - 1
    )

    def __post_init__(self) -> None:
        check_settings(self)
        # For a model in another format, all code reads the folder made from it.
        if self.model and is_foreign(self.model):
            object.__setattr__(self, "model", str(model_folder(self.model)))
        _ = self.speculation  # raises if it is invalid
        _ = self.kernels  # raises if an entry is invalid
        _ = self.online_quantization  # raises if it is invalid
        if self.kv_transfer is not None and not self.enable_prefix_caching:
            raise InputError(
                "--kv-transfer-config",
                "requires the prefix cache, whose pages it exchanges",
                "remove --no-enable-prefix-caching",
            )
        self.check_engines()
        if self.prefill_engines and self.kv_transfer is not None:
            raise InputError(
                "--prefill-engines",
                "does not work with --kv-transfer-config, which it sets itself",
                "remove one of them",
            )
        if self.prefill_engines and not self.enable_prefix_caching:
            raise InputError(
                "--prefill-engines",
                "requires the prefix cache, whose pages are sent",
                "remove --no-enable-prefix-caching",
            )
        self.check_experts()
        if parse_modules(self.lora_modules) and not self.enable_lora:
            raise InputError("--lora-modules", "requires --enable-lora", "add the flag")
        if self.lora_experts and not self.enable_lora:
            raise InputError("--lora-experts", "requires --enable-lora", "add the flag")
        if self.num_cpu_loras < self.max_loras:
            raise InputError(
                "--max-cpu-loras",
                f"expected at least --max-loras ({self.max_loras}), found {self.max_cpu_loras}",
                "raise it, or lower --max-loras",
            )

    @property
    def tokenizer_folder(self) -> str:
        """Folder with the tokenizer's files."""
        return self.tokenizer or self.model

    @property
    def num_cpu_loras(self) -> int:
        return 4 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    @property
    def kv_transfer(self) -> KvTransferConfig | None:
        """Parsed --kv-transfer-config. Raises InputError."""
        return self.kv_transfer_config and KvTransferConfig.parse(self.kv_transfer_config)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Parsed --speculative-config. Raises InputError."""
        if self.speculative_config is None:
            return None
        return SpeculativeConfig.parse(self.speculative_config, self.spec_acceptance)

    @property
    def online_quantization(self) -> OnlineQuantization | None:
        """Parsed --quantization and --quantization-config. Raises InputError."""
        if self.quantization is not None:
            return OnlineQuantization.parse(self.quantization, self.quantization_config)
        if self.quantization_config is not None:
            raise InputError(
                "--quantization-config", "requires --quantization", "add --quantization online"
            )
        return None

    @property
    def kernels(self) -> dict[str, str]:
        """Selected and excluded kernels by operation, in the form that qkernels takes."""
        found: dict[str, str] = {}
        for each in self.kernel:
            operation, equals, name = each.partition("=")
            if not (equals and name) or operation not in KERNEL_OPERATIONS:
                raise InputError(
                    "--kernel",
                    f"expected OP=NAME with one of {', '.join(KERNEL_OPERATIONS)}, found {each!r}",
                    f"for example --kernel {KERNEL_OPERATIONS[0]}=NAME",
                )
            found[operation] = ",".join(filter(None, (found.get(operation), name)))
        if self.batch_invariant:
            if found:
                raise InputError(
                    "--kernel",
                    "does not work with --batch-invariant, which selects the kernels",
                    "use one of the two flags",
                )
            found = dict.fromkeys(FIXED_ORDER_OPERATIONS, FIXED_ORDER)
        return found


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Create an EngineConfig from Python values, including dicts and tuples. Raises InputError."""
    given = {
        name: list(each) if type(each) is tuple else each
        for name, each in settings.items()
        if each is not None or name == "model"  # None is vLLM's "not set"
    }
    if not isinstance(given.get("dtype", ""), str):
        given["dtype"] = str(given["dtype"]).removeprefix("torch.")  # torch.float16
    for name in ("speculative_config", "kv_transfer_config", "quantization_config"):
        if isinstance(given.get(name), dict):
            given[name] = json.dumps(given[name])
    for name in ("model", "tokenizer", "download_dir"):
        if isinstance(given.get(name), Path):
            given[name] = str(given[name])
    return EngineConfig(**given)
