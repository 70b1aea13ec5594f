"""Data sets: what is sent. A row of DATASETS makes samples from settings. Loads no torch."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from formats.errors import InputError, one_line
from qserve.bench.dataset_settings import DatasetSettings
from qserve.bench.token_text import TokenText
from qserve.bench.trace import MOONCAKE_BLOCK, read_trace

# Limits of vLLM's: shorter and longer conversations are left out.
SHAREGPT_MIN, SHAREGPT_MAX_PROMPT, SHAREGPT_MAX_TOTAL = 4, 1024, 2048
SONNET_INTRODUCTION = "Pick as many lines as you can from these lines:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request to send."""

    prompt: str | list[int]
    prompt_len: int
    output_len: int
    arrival: float | None = None  # seconds from the start, where the data set says


def load_samples(settings: DatasetSettings, text: TokenText, seed: int) -> list[Sample]:
    """As many as `num_prompts`; a file with fewer is gone through again. Raises InputError."""
    random = np.random.default_rng(seed)
    samples: list[Sample] = []
    for sample in READERS[settings.dataset_name](settings, text, random):
        samples.append(sample)
        if len(samples) == settings.num_prompts:
            break
    if not samples:
        raise InputError(
            settings.dataset_path or settings.dataset_name,
            "holds no request that can be sent",
            "its prompts may be too short, too long or empty",
        )
    timed = samples[0].arrival is not None
    if not timed and len(samples) < settings.num_prompts:
        samples = [samples[i % len(samples)] for i in range(settings.num_prompts)]
    if settings.output_len is not None:
        samples = [replace(sample, output_len=settings.output_len) for sample in samples]
    return samples


def _random(
    settings: DatasetSettings, text: TokenText, random: np.random.Generator
) -> Iterator[Sample]:
    ratio = settings.random_range_ratio
    prefix = text.random_ids(settings.random_prefix_len, random)
    while True:
        input_len = _draw(settings.input_len or settings.random_input_len, ratio, random)
        output_len = _draw(settings.random_output_len, ratio, random)
        prompt, length = text.prompt(prefix + text.random_ids(input_len, random), random)
        yield Sample(prompt=prompt, prompt_len=length, output_len=output_len)


def _draw(length: int, ratio: float, random: np.random.Generator) -> int:
    """Uniform from floor(L(1-r)) to ceil(L(1+r)), at least 1."""
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    return max(1, int(random.integers(low, high + 1)))


def _sharegpt(
    settings: DatasetSettings, text: TokenText, random: np.random.Generator
) -> Iterator[Sample]:
    conversations = _read(settings, json.loads)
    if not isinstance(conversations, list):
        raise InputError(settings.dataset_path, "expected a list of conversations")
    turns = [each.get("conversations") or [] for each in conversations]
    turns = [each for each in turns if len(each) >= 2]
    random.shuffle(turns)
    for each in turns:
        prompt, answer = each[0]["value"], each[1]["value"]
        prompt_len = len(text.encode(prompt))
        output_len = settings.sharegpt_output_len or len(text.encode(answer))
        too_short = min(prompt_len, output_len) < SHAREGPT_MIN
        too_long = prompt_len > SHAREGPT_MAX_PROMPT or prompt_len + output_len > SHAREGPT_MAX_TOTAL
        if not too_short and not too_long:
            yield Sample(prompt=prompt, prompt_len=prompt_len, output_len=output_len)


def _sonnet(
    settings: DatasetSettings, text: TokenText, random: np.random.Generator
) -> Iterator[Sample]:
    lines = _read(settings, str.splitlines, default=_bundled_lines)
    lines = [line for line in lines if line.strip()]
    lengths = [len(text.encode(line + "\n")) for line in lines]
    mean = max(1.0, sum(lengths) / len(lengths))
    input_len = settings.input_len or settings.sonnet_input_len
    introduction = len(text.encode(SONNET_INTRODUCTION + "\n"))
    num_shared = max(0, round((settings.sonnet_prefix_len - introduction) / mean))
    num_lines = max(1, round((input_len - introduction) / mean))
    shared = lines[: min(num_shared, num_lines)]
    while True:
        rest = [lines[i] for i in random.integers(0, len(lines), num_lines - len(shared))]
        prompt = "\n".join([SONNET_INTRODUCTION, *shared, *rest]) + "\n"
        yield Sample(
            prompt=prompt,
            prompt_len=len(text.encode(prompt)),
            output_len=settings.sonnet_output_len,
        )


def _bundled_lines() -> list[str]:
    """Lines of the package's calibration texts, for a first try without a file."""
    texts = Path(__file__).resolve().parents[2] / "calibrate" / "texts.jsonl"
    lines = []
    for row in texts.read_text(encoding="utf-8").splitlines():
        lines += [line for line in json.loads(row)["text"].splitlines() if 20 <= len(line) <= 120]
    return lines


def _custom(
    settings: DatasetSettings, text: TokenText, random: np.random.Generator
) -> Iterator[Sample]:
    rows = _read(settings, lambda content: [json.loads(r) for r in content.splitlines() if r])
    for index, row in enumerate(rows, start=1):
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(prompt, str | list) or not prompt:
            raise InputError(f"{settings.dataset_path} line {index}", 'expected {"prompt": "..."}')
        yield Sample(
            prompt=prompt,
            prompt_len=len(text.encode(prompt)) if isinstance(prompt, str) else len(prompt),
            output_len=int(row.get("output_tokens") or settings.custom_output_len),
        )


def _prefix_repetition(
    settings: DatasetSettings, text: TokenText, random: np.random.Generator
) -> Iterator[Sample]:
    prefixes = [
        text.random_ids(settings.prefix_repetition_prefix_len, random)
        for _ in range(settings.prefix_repetition_num_prefixes)
    ]
    while True:
        prefix = prefixes[int(random.integers(len(prefixes)))]
        suffix = text.random_ids(settings.prefix_repetition_suffix_len, random)
        prompt, length = text.prompt(prefix + suffix, random)
        yield Sample(
            prompt=prompt, prompt_len=length, output_len=settings.prefix_repetition_output_len
        )


def _trace(
    settings: DatasetSettings, text: TokenText, random: np.random.Generator
) -> Iterator[Sample]:
    rows = read_trace(_path(settings), settings.num_prompts, settings.dataset_name)
    seed = int(random.integers(2**31))
    for row in rows:
        input_len = settings.input_len or row.input_len
        ids: list[int] = []
        for number in row.hash_ids:
            block = np.random.default_rng((seed, number))
            ids += text.random_ids(MOONCAKE_BLOCK, block)
        ids = ids[:input_len] + text.random_ids(max(0, input_len - len(ids)), random)
        prompt, length = text.prompt(ids, random)
        arrival = row.arrival * settings.time_scale if settings.use_trace_timestamps else None
        yield Sample(prompt=prompt, prompt_len=length, output_len=row.output_len, arrival=arrival)


READERS: dict[
    str, Callable[[DatasetSettings, TokenText, np.random.Generator], Iterator[Sample]]
] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "sonnet": _sonnet,
    "custom": _custom,
    "prefix_repetition": _prefix_repetition,
    "burstgpt": _trace,
    "azure": _trace,
    "timed_trace": _trace,
}


def _path(settings: DatasetSettings) -> str:
    if settings.dataset_path is None:
        raise InputError(
            "--dataset-path", f"expected the file of {settings.dataset_name}, found none"
        )
    return settings.dataset_path


def _read(
    settings: DatasetSettings,
    parse: Callable[[str], list],
    default: Callable[[], list] | None = None,
) -> list:
    """What a data set's file holds. Raises InputError."""
    if settings.dataset_path is None and default is not None:
        return default()
    path = _path(settings)
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(
            path, f"cannot be read as {settings.dataset_name}: {one_line(error)}"
        ) from None
