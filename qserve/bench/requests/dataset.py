"""Data sets of requests. Each function in READERS yields the samples of one. Loads no torch."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from formats.errors import InputError
from formats.files.json_rows import holds_json, json_rows, read_text
from qserve.bench.requests.dataset_settings import DatasetSettings
from qserve.bench.requests.token_text import TokenText
from qserve.bench.requests.trace import MOONCAKE_BLOCK, read_trace

# vLLM's limits in tokens: shorter and longer conversations are skipped
SHAREGPT_MIN, SHAREGPT_MAX_PROMPT, SHAREGPT_MAX_TOTAL = 4, 1024, 2048
SONNET_INTRODUCTION = "Pick as many lines as you can from these lines:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request to send."""

    prompt: str | list[int]
    prompt_len: int  # in tokens
    output_len: int  # in tokens
    arrival: float | None = None  # seconds from the start; None: the data set has no times


def load_samples(settings: DatasetSettings, text: TokenText, seed: int) -> list[Sample]:
    """Return `num_prompts` samples. A file with fewer is repeated. Raises InputError.

    Requests with times are not repeated, so there may be fewer of these.
    """
    random = np.random.default_rng(seed)
    samples: list[Sample] = []
    for sample in READERS[settings.dataset_name](settings, text, random):
        samples.append(sample)
        if len(samples) == settings.num_prompts:
            break
    if not samples:
        raise InputError(
            settings.dataset_path or settings.dataset_name,
            "contains no usable request",
            "check that its prompts are not empty, too short or too long",
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
    """Draw uniformly from floor(L(1-r)) to ceil(L(1+r)), for length L and ratio r; at least 1."""
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    return max(1, int(random.integers(low, high + 1)))


def _sharegpt(
    settings: DatasetSettings, text: TokenText, random: np.random.Generator
) -> Iterator[Sample]:
    turns = []
    for where, row in _rows(settings, "conversations"):
        if not isinstance(row, dict):
            raise InputError(
                where,
                'expected {"conversations": [...]}',
                "use ShareGPT's format, or another --dataset-name",
            )
        turns.append(row.get("conversations") or [])
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
    lines = _bundled_lines() if settings.dataset_path is None else _lines(settings)
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
    """Return the lines of the packaged calibration texts, so that no file is required."""
    texts = Path(__file__).resolve().parents[3] / "calibrate" / "texts" / "texts.jsonl"
    lines = []
    for row in texts.read_text(encoding="utf-8").splitlines():
        text = json.loads(row).get("text", "")  # a chat has none
        lines += [line for line in text.splitlines() if 20 <= len(line) <= 120]
    return lines


def _custom(
    settings: DatasetSettings, text: TokenText, random: np.random.Generator
) -> Iterator[Sample]:
    for where, row in _rows(settings, "prompt"):
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(prompt, str | list) or not prompt:
            raise InputError(
                where,
                'expected {"prompt": "..."}',
                "name the field as in this example, or use another --dataset-name",
            )
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
            "--dataset-path",
            f"is missing: --dataset-name {settings.dataset_name} reads a file",
            "add the path of the file",
        )
    return settings.dataset_path


def _rows(settings: DatasetSettings, field: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a JSON or JSON Lines file, each after its position. Raises InputError."""
    path = _path(settings)
    return json_rows(read_text(Path(path)), path, (field,))


def _lines(settings: DatasetSettings) -> list[str]:
    """Return the lines of a text file, or of the texts in a JSON file. Raises InputError."""
    path = Path(_path(settings))
    content = read_text(path)
    if not holds_json(path, content):
        return content.splitlines()
    lines = []
    for where, row in json_rows(content, str(path), ("text",)):
        text = row.get("text") if isinstance(row, dict) else row
        if not isinstance(text, str):
            raise InputError(
                where,
                'expected {"text": "..."}',
                "name the field as in this example, or use another --dataset-name",
            )
        lines += text.splitlines()
    return lines
