"""Settings of vLLM that this project does not have. Loads no torch.

A value that changes nothing here is accepted, so that a script or command written for vLLM runs
unchanged. Other values are refused with the remedy.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from formats.errors import InputError


@dataclass(frozen=True, slots=True)
class VllmSetting:
    """One setting of vLLM. `remedy` says what happens here, or what to do instead."""

    remedy: str
    accepted: tuple[Any, ...] | None = ()  # values that change nothing; None: all values
    is_switch: bool = False  # the flag takes no value

    def accepts(self, value: object) -> bool:
        """Return True if the value changes nothing. None is vLLM's "not set"."""
        # 0 == False in Python, and a switch is not a number.
        kinds = (bool,) if self.is_switch else (int, float, str, dict, list, bool)
        return (
            value is None
            or self.accepted is None
            or any(isinstance(value, kinds) and value == each for each in self.accepted)
        )


class VllmSettings(TypedDict, total=False):
    """Settings of vLLM, with the values that LLM and AsyncLLM accept, for type checkers."""

    convert: Literal["auto", "none", "embed", "classify"]
    cpu_offload_gb: Literal[0]
    disable_log_stats: Literal[True]
    disable_mm_preprocessor_cache: bool
    disable_sliding_window: Literal[False]
    enable_chunked_prefill: Literal[True]
    enable_prompt_embeds: Literal[False]
    enable_sleep_mode: bool
    fully_sharded_loras: bool
    generation_config: Literal["auto"]
    limit_mm_per_prompt: Mapping[str, int]
    max_logprobs: Literal[20]
    max_parallel_loading_workers: int
    mm_processor_cache_gb: float
    runner: Literal["auto", "generate", "pooling"]
    served_model_name: str | list[str]
    skip_tokenizer_init: Literal[False]
    swap_space: float
    task: Literal["auto", "generate", "embed", "embedding", "classify", "score"]
    tokenizer_mode: Literal["auto", "hf", "mistral"]
    trust_remote_code: bool
    use_tqdm_on_load: bool


FOLLOWS = "it follows from the model's files and the method or route that is called"
CONFIG_JSON = "edit config.json in the model's folder"
# Settings of vLLM's engine: keywords of LLM and AsyncLLM, and flags of commands with an engine.
ENGINE_SETTINGS: dict[str, VllmSetting] = {
    "additional_config": VllmSetting("it is for other platforms; leave it out", ({},)),
    "attention_backend": VllmSetting("use --kernel attention=NAME", ("auto", "AUTO")),
    "calculate_kv_scales": VllmSetting(
        "scales of KV pages are computed when they are written", None, True
    ),
    "compilation_config": VllmSetting("there is no torch.compile; see --enforce-eager"),
    "config_format": VllmSetting("the format follows from the files", ("auto", "hf", "mistral")),
    "convert": VllmSetting(FOLLOWS, ("auto", "none", "embed", "classify")),
    "cpu_offload_gb": VllmSetting(
        "weights stay on the GPU: fewer bits, such as --quantization w4a16", (0,)
    ),
    "cuda_graph_sizes": VllmSetting("sizes of CUDA graphs follow from --max-num-seqs"),
    "cudagraph_capture_sizes": VllmSetting("sizes of CUDA graphs follow from --max-num-seqs"),
    "disable_cascade_attn": VllmSetting("there is no cascade attention", None, True),
    "disable_custom_all_reduce": VllmSetting("use --all-reduce nccl", (False,), True),
    "disable_log_stats": VllmSetting("figures are at /metrics, not in the log", (True,), True),
    "disable_mm_preprocessor_cache": VllmSetting("KV pages of images are reused", None, True),
    "disable_sliding_window": VllmSetting(
        "set a --max-model-len of the window's size", (False,), True
    ),
    "enable_chunked_prefill": VllmSetting(
        "long prompts are always computed in chunks", (True,), True
    ),
    "enable_eplb": VllmSetting(
        "use --record-expert-loads and --expert-placement-strategy", (False,), True
    ),
    "enable_prompt_embeds": VllmSetting("prompts are text or token ids", (False,), True),
    "enable_sleep_mode": VllmSetting("sleep and wake_up always work", None, True),
    "fully_sharded_loras": VllmSetting("adapters are divided as their linears are", None, True),
    "generation_config": VllmSetting(
        "defaults come from generation_config.json in the model's folder", ("auto",)
    ),
    "guided_decoding_backend": VllmSetting(
        "llguidance is the only backend; leave it out", ("auto", "guidance")
    ),
    "hf_overrides": VllmSetting(CONFIG_JSON, ({},)),
    "hf_token": VllmSetting("set the environment variable HF_TOKEN"),
    "kv_cache_memory_bytes": VllmSetting("use --kv-cache-memory, in GiB"),
    "kv_events_config": VllmSetting("figures are at /metrics", ({},)),
    "kv_offloading_size": VllmSetting("use --kv-offload-gb"),
    "logits_processors": VllmSetting(
        "use logit_bias, allowed_token_ids or structured_outputs of SamplingParams", ([],)
    ),
    "long_prefill_token_threshold": VllmSetting(
        "use --target-itl-ms, which cuts prompts to a time", (0,)
    ),
    "max_logprobs": VllmSetting("it is 20", (20,)),
    "max_long_partial_prefills": VllmSetting(
        "a step computes chunks of several prompts anyway", (1,)
    ),
    "max_num_partial_prefills": VllmSetting(
        "a step computes chunks of several prompts anyway", (1,)
    ),
    "max_parallel_loading_workers": VllmSetting("weights are loaded tensor by tensor", None),
    "mm_processor_cache_gb": VllmSetting("KV pages of images are reused", None),
    "mm_processor_kwargs": VllmSetting(
        "edit preprocessor_config.json in the model's folder", ({},)
    ),
    "model_loader_extra_config": VllmSetting("weights are read tensor by tensor", ({},)),
    "nnodes": VllmSetting("use --distributed-executor-backend ray", (1,)),
    "num_scheduler_steps": VllmSetting("steps are planned while the GPU runs", (1,)),
    "override_generation_config": VllmSetting(
        "edit generation_config.json in the model's folder", ({},)
    ),
    "performance_mode": VllmSetting(
        "use --target-itl-ms or --max-num-batched-tokens", ("balanced",)
    ),
    "pooler_config": VllmSetting("it follows from modules.json in the model's folder", ({},)),
    "preemption_mode": VllmSetting(
        "tokens of preempted requests are computed again", ("recompute",)
    ),
    "rope_scaling": VllmSetting(CONFIG_JSON, ({},)),
    "rope_theta": VllmSetting(CONFIG_JSON),
    "runner": VllmSetting(FOLLOWS, ("auto", "generate", "pooling")),
    "scheduler_delay_factor": VllmSetting("see --admission", (0,)),
    "skip_tokenizer_init": VllmSetting(
        "the tokenizer is loaded when a text needs it; SamplingParams(detokenize=False) needs none",
        (False,),
        True,
    ),
    "stream_interval": VllmSetting("each token has a chunk", (1,)),
    "structured_outputs_config": VllmSetting(
        "llguidance is the only backend; leave it out",
        ({}, {"backend": "auto"}, {"backend": "guidance"}),
    ),
    "swap_space": VllmSetting("tokens of preempted requests are computed again", None),
    "task": VllmSetting(FOLLOWS, ("auto", "generate", "embed", "embedding", "classify", "score")),
    "tokenizer_mode": VllmSetting("the format follows from the files", ("auto", "hf", "mistral")),
    "tokenizer_revision": VllmSetting("add it to --tokenizer: NAME@REVISION"),
    "trust_remote_code": VllmSetting("code in model folders is never run", None, True),
    "use_tqdm_on_load": VllmSetting("loading prints its phases", None, True),
    "use_v2_block_manager": VllmSetting("there is one block manager", None, True),
    "worker_cls": VllmSetting("workers cannot be replaced", ("auto",)),
    "worker_extension_cls": VllmSetting("methods of workers cannot be added", ("",)),
}
# Keywords of LLM and AsyncLLM that are flags of `serve` here.
PYTHON_SETTINGS: dict[str, VllmSetting] = {
    "allowed_local_media_path": VllmSetting("pass images, not URLs", ("",)),
    "limit_mm_per_prompt": VllmSetting("a prompt may have any number of images", None),
    "served_model_name": VllmSetting("replies in Python do not name the model", None),
}
# Settings of vLLM's HTTP server: flags of `serve`.
SERVER_SETTINGS: dict[str, VllmSetting] = {
    "allowed_headers": VllmSetting("use --allowed-origins", (["*"],)),
    "allowed_methods": VllmSetting("use --allowed-origins", (["*"],)),
    "api_server_count": VllmSetting("one process serves HTTP", (1,)),
    "chat_template": VllmSetting(
        "the template is the model's own: edit chat_template.jinja in its folder"
    ),
    "chat_template_content_format": VllmSetting("it follows from the template", ("auto",)),
    "default_chat_template_kwargs": VllmSetting("requests set chat_template_kwargs", ({},)),
    "disable_fastapi_docs": VllmSetting("/docs is not FastAPI's", (False,), True),
    "disable_log_requests": VllmSetting("requests are not logged", None, True),
    "disable_uvicorn_access_log": VllmSetting("there is no access log", None, True),
    "enable_force_include_usage": VllmSetting(
        "set stream_options.include_usage in requests", (False,), True
    ),
    "enable_log_outputs": VllmSetting("answers are not logged", (False,), True),
    "enable_log_requests": VllmSetting("requests are not logged", (False,), True),
    "enable_prompt_tokens_details": VllmSetting("usage always has them", None, True),
    "enable_reasoning": VllmSetting("see --reasoning-parser", None, True),
    "enable_request_id_headers": VllmSetting("replies always have X-Request-Id", None, True),
    "enable_server_load_tracking": VllmSetting("/load always counts requests", None, True),
    "enable_tokenizer_info_endpoint": VllmSetting("use /tokenize", (False,), True),
    "exclude_tools_when_tool_choice_none": VllmSetting("tools are left out anyway", (True,), True),
    "h11_max_incomplete_event_size": VllmSetting("the headers of a request may have 16 KiB"),
    "log_config_file": VllmSetting("use --log-level and --log-format"),
    "max_log_len": VllmSetting("requests are not logged", None),
    "middleware": VllmSetting("put a proxy before the server"),
    "response_role": VllmSetting("answers have the role assistant", ("assistant",)),
    "return_tokens_as_token_ids": VllmSetting("set it in requests", (False,), True),
    "ssl_cert_reqs": VllmSetting("use --ssl-ca-certs", (0,)),
    "tool_parser_plugin": VllmSetting("choose one of the formats of --tool-call-parser", ("",)),
    "tool_server": VllmSetting("clients run the tools"),
    "trust_request_chat_template": VllmSetting("the template is the model's own", (False,), True),
    "uvicorn_log_level": VllmSetting("use --log-level", ("info",)),
}


def check_keywords(given: Mapping[str, object], known: Iterable[str]) -> list[str]:
    """Check keywords that are not parameters; return a note on each that has no effect.

    `known`: names of the parameters. Raises InputError for a keyword that cannot be accepted.
    """
    notes = []
    for name, value in given.items():
        row = ENGINE_SETTINGS.get(name) or PYTHON_SETTINGS.get(name)
        if row is None:
            like = difflib.get_close_matches(name, list(known), 1)
            raise InputError(
                name,
                "is not a setting of the engine",
                f"did you mean {like[0]}?" if like else "see the fields of qserve.EngineConfig",
            )
        if not row.accepts(value):
            raise InputError(f"{name}={value!r:.80}", "is not supported", row.remedy)
        notes.append(no_effect(name, row))
    return notes


def no_effect(name: str, row: VllmSetting) -> str:
    """Return the note on a setting that is accepted and changes nothing."""
    return f"{name} has no effect: {row.remedy}"


def take_flags(
    arguments: list[str], settings: Mapping[str, VllmSetting]
) -> tuple[list[str], list[str]]:
    """Remove the flags of settings that change nothing; return other arguments and the notes.

    Raises InputError for a flag with a value that cannot be accepted.
    """
    left, notes, rest = [], [], iter(arguments)
    for argument in rest:
        if argument.startswith("-O") and "compilation_config" in settings:
            raise InputError(argument, "is not supported", settings["compilation_config"].remedy)
        flag, equals, text = argument.partition("=")
        is_off = flag.startswith("--no-")
        name = flag.removeprefix("--no" if is_off else "-").removeprefix("-").replace("-", "_")
        name, dot, key = name.partition(".")  # --a.b 1 is --a {"b": 1}
        row = settings.get(name)
        if row is None or not flag.startswith("--") or (is_off and not row.is_switch):
            left.append(argument)
            continue
        value = not is_off if row.is_switch else _flag_value(text if equals else next(rest, ""))
        value = {key: value} if dot else value
        if not row.accepts(value):
            raise InputError(argument, "is not supported", row.remedy)
        notes.append(no_effect(flag, row))
    return left, notes


def _flag_value(text: str) -> object:
    """Return the value of a flag as Python's: numbers and JSON are parsed, other text is kept."""
    try:
        return None if text == "None" else json.loads(text)
    except ValueError:
        return text
