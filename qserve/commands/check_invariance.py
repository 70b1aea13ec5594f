"""`qserve check-invariance`: check that a request's output bits do not depend on the batch.

Each request is computed alone, then with other requests, in chunks, from the prefix cache, with
preemption, with drafts, and with all of these together. Every time its tokens, their log
probabilities and the log probabilities of its prompt must be bit-identical. With --lora-modules
some requests use adapters; with a vision-language model some have images. Drafts are left out with
--prefill-context-parallel-size. Loads torch only when it computes.

A "comparison" runs the requests in given batches and settings, and compares the results.
"""

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from formats.errors import InputError
from qserve.command_line.command import Command
from qserve.command_line.setting import check_settings, setting
from qserve.commands.invariance_requests import draw_params, draw_prompts
from qserve.config import EngineConfig
from qserve.errors import LEAVE_OUT

if TYPE_CHECKING:
    from qserve.library.outputs import RequestOutput
    from qserve.llm import LLM
    from qserve.model.model_config import ModelConfig

COMPARISONS = ("together", "random", "chunks", "preemption", "drafts", "crossed")
FEW_SEQS = 16  # --max-num-seqs of the run that computes prompts in chunks
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4}'
ROW = "{:<34}{:>10}{:>16}{:>14}{:>16}{:>14}{:>17}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InvarianceConfig:
    """Settings of `qserve check-invariance`, besides the engine's."""

    num_requests: int = setting(32, "number of random requests", low=2)
    max_input_len: int = setting(500, "longest prompt, in tokens", low=2)
    long_every: int = setting(
        1, "every N-th prompt has up to --max-input-len tokens, the others up to 256", low=1
    )
    output_len: int = setting(16, "tokens of each output", low=1)
    chunk_tokens: int = setting(
        48, "token budget of a step in the run that computes prompts in chunks", low=16
    )
    structured_output: bool = setting(
        False, "give some requests a structured output (requires a tokenizer and llguidance)"
    )
    comparison: list[str] = setting(
        [], f"comparisons to run, of {', '.join(COMPARISONS)}; default: all", many=True
    )
    default_kernels: bool = setting(
        False, "check the default kernels instead of those of --batch-invariant"
    )

    def __post_init__(self) -> None:
        """Raise InputError for an unknown comparison or a number outside of its range."""
        check_settings(self)
        for name in self.comparison:
            if name not in COMPARISONS:
                expected = f"expected one of {', '.join(COMPARISONS)}, found {name!r}"
                raise InputError("--comparison", expected, LEAVE_OUT)

    def has(self, *comparisons: str) -> bool:
        """True if at least one of these comparisons was requested."""
        return not self.comparison or any(each in self.comparison for each in comparisons)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Comparison of requests in one run with the same requests computed alone."""

    comparison: str
    requests: int
    tokens_differ: int
    bits_differ: int  # requests that differ in a token or in a log probability
    cached_tokens: int  # prompt tokens found in the prefix cache, over all requests
    preemptions: int
    accepted_drafts: int


Logprobs = list[dict[int, float]]  # for each position: token id -> log probability
# Output tokens, their log probabilities, the prompt's log probabilities (empty if not requested).
Facts = tuple[list[int], Logprobs, Logprobs]


def check_invariance(model: str, engine: EngineConfig, config: InvarianceConfig) -> int:
    """Print a table of the comparisons. Returns 1 if a request differs, else 0."""
    from qserve.hub.local import local_config

    engine = dataclasses.replace(local_config(engine), batch_invariant=not config.default_kernels)
    if config.has("drafts", "crossed") and not _takes_drafts(engine):
        print("Without drafts: they do not work with --prefill-context-parallel-size", flush=True)
    results = []
    columns = ("comparison", "requests", "tokens differ", "bits differ")
    print(ROW.format(*columns, "cached tokens", "preemptions", "accepted drafts"), flush=True)
    for result in compare(engine, config):
        results.append(result)
        print(ROW.format(*dataclasses.astuple(result)), flush=True)
    return int(any(result.bits_differ for result in results))


class RandomRequests:
    """Random requests, and what each of them gives when it is computed alone."""

    def __init__(
        self, llm: "LLM", engine: EngineConfig, config: InvarianceConfig, rng: random.Random
    ) -> None:
        """Draw the requests and compute each alone. Raises InputError."""
        from qserve.lora.request import parse_modules

        model = llm.engine.model_config
        longest = min(config.max_input_len, llm.engine.max_model_len - config.output_len)
        placeholder_id = None
        if model.vision is not None:
            longest = min(longest, llm.engine.max_model_len // 2)  # leave room for images
            placeholder_id = model.vision.placeholder_of(llm.get_tokenizer().encode)
        self._prompts = draw_prompts(
            rng, config.num_requests, longest, config.long_every, model, placeholder_id
        )
        self._params = draw_params(
            self._prompts, config.output_len, structured=config.structured_output, model=model
        )
        self._loras = [None, *parse_modules(engine.lora_modules)]
        self.numbers = list(range(config.num_requests))
        outputs = {n: self._run(llm, [n])[n] for n in self.numbers}
        self._alone = {n: _facts(output) for n, output in outputs.items()}
        # Tokens of the longest prompt and of its output.
        self.longest = max(len(each.prompt_token_ids) for each in outputs.values())
        self.longest += config.output_len

    def judged(self, comparison: str, llm: "LLM", *batches: Sequence[int]) -> Result:
        """Compute the requests of each batch together, and compare them with those alone."""
        outputs = [pair for numbers in batches for pair in self._run(llm, numbers).items()]
        found = [(_facts(output), self._alone[n]) for n, output in outputs]
        return Result(
            comparison=comparison,
            requests=len(found),
            tokens_differ=sum(facts[0] != others[0] for facts, others in found),
            bits_differ=sum(facts != others for facts, others in found),
            cached_tokens=sum(output.num_cached_tokens for _, output in outputs),
            preemptions=sum(output.num_preemptions for _, output in outputs),
            accepted_drafts=_accepted_drafts(llm),
        )

    def _run(self, llm: "LLM", numbers: Sequence[int]) -> dict[int, "RequestOutput"]:
        outputs = llm.generate(
            [self._prompts[n] for n in numbers],
            [self._params[n] for n in numbers],
            use_tqdm=False,
            lora_request=[self._loras[n % len(self._loras)] for n in numbers],
        )
        return dict(zip(numbers, outputs, strict=True))


def compare(engine: EngineConfig, config: InvarianceConfig) -> Iterator[Result]:
    """Compute the requests alone, then yield a Result per comparison. Raises InputError."""
    from qserve import LLM

    rng = random.Random(engine.seed)

    def start(**changes: Any) -> LLM:
        changes = {"speculative_config": None, **changes}
        return LLM(**dataclasses.asdict(dataclasses.replace(engine, **changes)))

    llm = start(enable_prefix_caching=False)
    try:
        requests = RandomRequests(llm, engine, config, rng)
        model, everyone = llm.engine.model_config, requests.numbers
        yield requests.judged("alone again", llm, everyone[:1])
        if model.vision is not None and config.has("together", "random"):
            # A new engine: the old one has cached embeddings of images that were encoded alone.
            llm.close()
            llm = start(enable_prefix_caching=False)
        if config.has("together"):
            yield requests.judged("all together", llm, everyone)
        most = min(config.num_requests, engine.max_num_seqs)
        batches = _random_batches(rng, everyone, most)
        if config.has("random"):
            yield requests.judged(f"random batches of 1 to {most}", llm, *batches)
    finally:
        llm.close()
    chunks, seqs = _chunk_limits(engine, config, model, requests.longest)
    if config.has("chunks"):
        with closing(start(max_num_batched_tokens=chunks, max_num_seqs=FEW_SEQS)) as llm:
            yield requests.judged(f"chunks of up to {chunks} tokens", llm, everyone)
            yield requests.judged("from the prefix cache", llm, everyone)
    pages = 2 * -(-requests.longest // engine.block_size)
    few = {"num_gpu_blocks_override": pages, "admission": "fits"}
    if config.has("preemption"):
        with closing(start(**few, enable_prefix_caching=False)) as llm:
            yield requests.judged(f"{pages} KV pages, with preemption", llm, everyone)
    drafts = {}
    if _takes_drafts(engine):
        drafts["speculative_config"] = engine.speculative_config or DRAFTS
    if drafts and config.has("drafts"):
        with closing(start(**drafts)) as llm:
            method = llm.engine.config.speculation.method
            yield requests.judged(f"with {method} drafts", llm, everyone)
    crossed = {**few, **drafts, "max_num_batched_tokens": chunks, "max_num_seqs": seqs}
    if config.has("crossed"):
        with closing(start(**crossed, enforce_eager=True)) as llm:
            batches = _random_batches(rng, everyone, most)
            yield requests.judged("all of these, without CUDA graphs", llm, *batches)


def _chunk_limits(
    engine: EngineConfig, config: InvarianceConfig, model: "ModelConfig", longest: int
) -> tuple[int, int]:
    """Return --max-num-batched-tokens and --max-num-seqs of the run with chunks.

    `longest`: tokens of the longest request.
    """
    if model.vision is None or not model.vision.is_mutual:
        return config.chunk_tokens, engine.max_num_seqs
    from qserve.engine.media_limits import largest_image

    # each image is computed in one step, or each prompt
    mutual = longest
    if not model.vision.family.has_mutual_prompt:
        mutual = largest_image(engine.model, model.vision)
    seqs = min(engine.max_num_seqs, FEW_SEQS)
    return max(config.chunk_tokens, 2 * mutual + seqs), seqs


def _takes_drafts(engine: EngineConfig) -> bool:
    return engine.prefill_context_parallel_size == 1


def _random_batches(rng: random.Random, everyone: Sequence[int], most: int) -> list[list[int]]:
    """Shuffle the requests and divide them into batches of 1 to `most`, log-uniform in size."""
    left = rng.sample(everyone, len(everyone))
    batches = []
    while left:
        size = int(math.exp(rng.uniform(0, math.log(most + 1))))
        batches.append(left[:size])
        left = left[size:]
    return batches


def _facts(output: "RequestOutput") -> Facts:
    (completion,) = output.outputs
    return (
        list(completion.token_ids),
        [_numbers(each) for each in completion.logprobs or ()],
        [_numbers(each) for each in output.prompt_logprobs or () if each is not None],
    )


def _numbers(of_token: Any) -> dict[int, float]:
    return {token: each.logprob for token, each in of_token.items()}


def _accepted_drafts(llm: "LLM") -> int:
    """Number of drafts that were accepted since the last call."""
    speculation = llm.engine.scheduler.speculation
    return 0 if speculation is None else sum(speculation.take_counts()[2:])


CHECK_INVARIANCE = Command(
    help="check that a request's output bits do not depend on its batch",
    settings=(EngineConfig, InvarianceConfig),
    run=check_invariance,
)
