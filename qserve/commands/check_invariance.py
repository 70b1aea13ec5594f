"""`qserve check-invariance`: compare a request's bits alone and in other companies.

Each request is computed alone, then with others, in chunks, from the prefix cache, with preemption
and with drafts. Its tokens and log probabilities must be the same bits. With --lora-modules some of
the requests have adapters; with a vision-language model some have images. Imports torch only to
compute.
"""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qserve.command_line.command import Command
from qserve.command_line.setting import setting
from qserve.config import EngineConfig

if TYPE_CHECKING:
    from PIL.Image import Image

    from qserve.library.outputs import RequestOutput
    from qserve.model.model_config import ModelConfig

NUM_LOGPROBS = 5
CHUNK_TOKENS = 48  # of a step, where prompts are computed in chunks
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4}'


@dataclass(frozen=True, slots=True, kw_only=True)
class InvarianceConfig:
    """Settings of `qserve check-invariance`, besides the engine's."""

    num_requests: int = setting(32, "number of random requests", low=2)
    max_input_len: int = setting(500, "longest prompt, in tokens", low=2)
    output_len: int = setting(16, "tokens of each output", low=1)
    default_kernels: bool = setting(
        False, "check the default kernels instead of those of --batch-invariant"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Requests of one company that differ from the same requests alone."""

    company: str
    requests: int
    tokens_differ: int
    bits_differ: int  # in a token or a log probability
    cached_tokens: int  # of all prompts, found in the prefix cache


Facts = tuple[list[int], list[dict[int, float]]]  # tokens; of each, the log probabilities


def check_invariance(model: str, engine: EngineConfig, config: InvarianceConfig) -> int:
    """Print a table; return 1 if a request differs."""
    from qserve.hub.local import local_config

    engine = dataclasses.replace(local_config(engine), batch_invariant=not config.default_kernels)
    results = []
    row = "{:<34}{:>10}{:>16}{:>14}"
    print(row.format("company", "requests", "tokens differ", "bits differ"), flush=True)
    for result in compare(engine, config):
        results.append(result)
        print(
            row.format(result.company, result.requests, result.tokens_differ, result.bits_differ),
            flush=True,
        )
    return int(any(result.bits_differ for result in results))


def compare(engine: EngineConfig, config: InvarianceConfig) -> Iterator[Result]:
    """Compute the requests alone, then in each company. Raises InputError."""
    from qserve import LLM, SamplingParams
    from qserve.lora.request import parse_modules

    rng = random.Random(engine.seed)

    def start(**changes: Any) -> LLM:
        return LLM(**dataclasses.asdict(dataclasses.replace(engine, **changes)))

    with closing(start(enable_prefix_caching=False)) as llm:
        model = llm.engine.model_config
        longest = min(config.max_input_len, llm.engine.max_model_len - config.output_len)
        if model.vision is not None:
            longest = min(longest, llm.engine.max_model_len // 2)  # leave room for images
        prompts = _prompts(rng, config.num_requests, longest, model)
        params = [
            SamplingParams(
                temperature=float(number % 2),
                seed=number,
                max_tokens=config.output_len,
                ignore_eos=True,
                logprobs=NUM_LOGPROBS,
                detokenize=False,
            )
            for number in range(config.num_requests)
        ]

        loras = [None, *parse_modules(engine.lora_modules)]

        cached, total = 0, 0  # tokens of the last run; of the longest request

        def run(llm: LLM, numbers: Sequence[int]) -> dict[int, Facts]:
            outputs = llm.generate(
                [prompts[n] for n in numbers],
                [params[n] for n in numbers],
                use_tqdm=False,
                lora_request=[loras[n % len(loras)] for n in numbers],
            )
            nonlocal cached, total
            cached = sum(output.num_cached_tokens for output in outputs)
            total = max(
                total, *(len(each.prompt_token_ids) + config.output_len for each in outputs)
            )
            return {n: _facts(output) for n, output in zip(numbers, outputs, strict=True)}

        everyone = list(range(config.num_requests))
        alone = {n: run(llm, [n])[n] for n in everyone}

        def judged(company: str, found: dict[int, Facts]) -> Result:
            return Result(
                company=company,
                requests=len(found),
                tokens_differ=sum(found[n][0] != alone[n][0] for n in found),
                bits_differ=sum(found[n] != alone[n] for n in found),
                cached_tokens=cached,
            )

        yield judged("alone again", run(llm, everyone[:1]))
    # anew, or embeddings of images would still be those that were encoded alone
    with closing(start(enable_prefix_caching=False)) as llm:
        yield judged("all together", run(llm, everyone))
        for size in (2, config.num_requests // 2):
            some = rng.sample(everyone, max(2, size))
            yield judged(f"{len(some)} together, in random order", run(llm, some))
    with closing(start(max_num_batched_tokens=CHUNK_TOKENS, max_num_seqs=16)) as llm:
        yield judged(f"chunks of up to {CHUNK_TOKENS} tokens", run(llm, everyone))
        yield judged("from the prefix cache", run(llm, everyone))
    pages = 2 * -(-total // engine.block_size)
    few = {"num_gpu_blocks_override": pages, "admission": "fits", "enable_prefix_caching": False}
    with closing(start(**few)) as llm:
        yield judged(f"{pages} KV pages, with preemption", run(llm, everyone))
    if model.has_states:
        return  # speculation is refused
    with closing(start(speculative_config=DRAFTS)) as llm:
        yield judged("with ngram drafts", run(llm, everyone))


def _prompts(
    rng: random.Random, number: int, longest: int, model: "ModelConfig"
) -> list[dict[str, Any]]:
    """Random prompts; some repeat themselves, so that drafts are accepted.

    For vision-language models two of three have an image, which others have, too.
    """
    vision = model.vision
    special = set() if vision is None else vision.media_tokens
    plain = [token for token in range(model.vocab_size) if token not in special]
    images = [] if vision is None else _images(rng)
    prompts: list[dict[str, Any]] = []
    for each in range(number):
        length = rng.randint(1, longest)
        period = rng.randint(1, 8) if each % 3 == 0 else length
        tokens = [rng.choice(plain) for _ in range(period)]
        prompt: dict[str, Any] = {"prompt_token_ids": (tokens * length)[:length]}
        if vision is not None and each % 3:
            prompt["prompt_token_ids"][rng.randrange(length)] = vision.placeholder_id
            prompt["multi_modal_data"] = {"image": rng.choice(images)}
        prompts.append(prompt)
    return prompts


def _images(rng: random.Random) -> list["Image"]:
    """Random images of several sizes, two of them alike in size."""
    from PIL import Image

    sizes = ((64, 48), (64, 48), (40, 90))
    return [Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1])) for size in sizes]


def _facts(output: "RequestOutput") -> Facts:
    (completion,) = output.outputs
    logprobs = [
        {token: each.logprob for token, each in of_token.items()}
        for of_token in completion.logprobs or ()
    ]
    return list(completion.token_ids), logprobs


CHECK_INVARIANCE = Command(
    help="compare a request's bits alone and in other batches",
    settings=(EngineConfig, InvarianceConfig),
    run=check_invariance,
)
