"""Settings of the requests to send: data set, lengths, shared prefixes.

The names are those of vLLM. Loads no torch.
"""

from dataclasses import dataclass

from qserve.command_line.setting import check_settings, setting

DATASETS = (
    "random",
    "sharegpt",
    "sonnet",
    "custom",
    "prefix_repetition",
    "burstgpt",
    "azure",
    "timed_trace",
)
# data sets for which `bench serve` sets --ignore-eos by default
SYNTHETIC = ("random", "sonnet", "prefix_repetition", "burstgpt", "azure", "timed_trace")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSettings:
    """Settings of a benchmark's requests."""

    dataset_name: str = setting(
        "random",
        "random: random tokens; sharegpt: a file of conversations; sonnet: lines of text after a "
        "shared prefix; custom: JSON or JSON Lines with prompt and output_tokens; "
        "prefix_repetition: random tokens after one of several prefixes; burstgpt, azure, "
        "timed_trace (Mooncake's jsonl): the lengths in a trace, and with "
        "--use-trace-timestamps its times",
        DATASETS,
    )
    dataset_path: str | None = setting(None, "file of the data set, if it has one")
    num_prompts: int = setting(1000, "number of requests to send", low=1)
    input_len: int | None = setting(None, "prompt length in tokens, for any data set", low=1)
    output_len: int | None = setting(
        None, "output length in tokens, for any data set; overrides the file's", low=1
    )
    random_input_len: int = setting(1024, "random: prompt length in tokens", low=1)
    random_output_len: int = setting(128, "random: output length in tokens", low=1)
    random_range_ratio: float = setting(
        0.0,
        "random: lengths are uniform from floor(L(1-r)) to ceil(L(1+r)), as in vLLM; in "
        "SGLang and InferenceX the range is L*r to L",
        low=0,
        high=1,
    )
    random_prefix_len: int = setting(
        0,
        "random: length of a prefix that all prompts share, in addition to --random-input-len",
        low=0,
    )
    sharegpt_output_len: int | None = setting(
        None, "sharegpt: output length in tokens; default: the length of each answer", low=1
    )
    sonnet_input_len: int = setting(550, "sonnet: prompt length in tokens", low=1)
    sonnet_output_len: int = setting(150, "sonnet: output length in tokens", low=1)
    sonnet_prefix_len: int = setting(
        200,
        "sonnet: length of the prefix that all prompts share, as part of --sonnet-input-len",
        low=0,
    )
    custom_output_len: int = setting(
        256, "custom: output length in tokens of requests without output_tokens", low=1
    )
    prefix_repetition_prefix_len: int = setting(
        256, "prefix_repetition: length of each prefix in tokens", low=1
    )
    prefix_repetition_suffix_len: int = setting(
        256, "prefix_repetition: number of tokens after the prefix", low=1
    )
    prefix_repetition_num_prefixes: int = setting(
        10, "prefix_repetition: number of different prefixes", low=1
    )
    prefix_repetition_output_len: int = setting(
        128, "prefix_repetition: output length in tokens", low=1
    )
    use_trace_timestamps: bool = setting(
        False, "send at the trace's times instead of --request-rate"
    )
    time_scale: float = setting(1.0, "factor for the times of a trace; 0.5 doubles the rate", low=0)
    tokenizer: str | None = setting(
        None,
        "folder with tokenizer.json; default: the model, if it is a local folder; without a "
        "tokenizer, random prompts are sent as token ids, and texts are measured in words",
    )
    random_vocab_size: int | None = setting(
        None,
        "random tokens have ids below this one; default: the vocabulary size of the tokenizer or "
        "the model folder, else 8000",
        low=2,
    )

    def __post_init__(self) -> None:
        check_settings(self)
