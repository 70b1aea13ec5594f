"""Settings of what is sent: data set, lengths, likeness. Names are vLLM's. Loads no torch."""

from dataclasses import dataclass

from qserve.setting import check_settings, setting

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
SYNTHETIC = ("random", "sonnet", "prefix_repetition", "burstgpt", "azure", "timed_trace")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSettings:
    """What the requests of a benchmark hold."""

    dataset_name: str = setting(
        "random",
        "random: token ids; sharegpt: a file of conversations; sonnet: lines after a shared prefix;"
        " custom: jsonl of prompt and output_tokens; prefix_repetition; burstgpt, azure,"
        " timed_trace (Mooncake's jsonl): lengths, and times with --use-trace-timestamps",
        DATASETS,
    )
    dataset_path: str | None = setting(None, "the data set's file, if it is one")
    num_prompts: int = setting(1000, "requests to send", low=1)
    input_len: int | None = setting(None, "prompt tokens, for any data set", low=1)
    output_len: int | None = setting(
        None, "output tokens, for any data set, whatever its file says", low=1
    )
    random_input_len: int = setting(1024, "prompt tokens of random", low=1)
    random_output_len: int = setting(128, "output tokens of random", low=1)
    random_range_ratio: float = setting(
        0.0,
        "lengths of random are uniform from floor(L(1-r)) to ceil(L(1+r)), as in vLLM; in SGLang"
        " and InferenceX it means L*r to L",
        low=0,
        high=1,
    )
    random_prefix_len: int = setting(
        0, "tokens that all prompts of random begin with, beside --random-input-len", low=0
    )
    sharegpt_output_len: int | None = setting(
        None, "output tokens of sharegpt; default: the length of the file's answers", low=1
    )
    sonnet_input_len: int = setting(550, "prompt tokens of sonnet", low=1)
    sonnet_output_len: int = setting(150, "output tokens of sonnet", low=1)
    sonnet_prefix_len: int = setting(200, "of these, tokens that all prompts share", low=0)
    custom_output_len: int = setting(
        256, "output tokens of custom where a line does not state output_tokens", low=1
    )
    prefix_repetition_prefix_len: int = setting(256, "tokens of a shared prefix", low=1)
    prefix_repetition_suffix_len: int = setting(256, "tokens of a prompt after its prefix", low=1)
    prefix_repetition_num_prefixes: int = setting(10, "different prefixes", low=1)
    prefix_repetition_output_len: int = setting(128, "output tokens of prefix_repetition", low=1)
    use_trace_timestamps: bool = setting(
        False, "send when the trace says, in place of --request-rate"
    )
    time_scale: float = setting(
        1.0, "times of a trace are multiplied by this; 0.5: twice the rate", low=0
    )
    tokenizer: str | None = setting(
        None,
        "folder with tokenizer.json; default: the model, where it is a folder here. Without one"
        " prompts are token ids, and text data sets count words",
    )
    random_vocab_size: int | None = setting(
        None,
        "token ids of random are below this; default: the tokenizer's, the model folder's, else"
        " 8000",
        low=2,
    )

    def __post_init__(self) -> None:
        check_settings(self)
