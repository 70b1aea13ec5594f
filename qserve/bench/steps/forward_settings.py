"""Settings of `qserve bench forward` and `qserve bench compare`. Loads no torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from formats.errors import InputError, one_line
from qserve.bench.steps.step_case import CaseRequests, StepCase, decode_cases, prefill_cases
from qserve.command_line.setting import check_settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSettings:
    """Settings of `bench forward`: the steps to measure, and the number of repetitions."""

    case: list[str] = setting(
        [],
        "step to measure, NAME=[N*]TOKENS[@CONTEXT][c][:DRAFTS],...: N requests with TOKENS new "
        "tokens each after CONTEXT computed tokens; c: a chunk that does not end its prompt; "
        "DRAFTS: number of drafts to verify; such as decode=32*1@8192 or mix=2048,32*1@4096",
        many=True,
    )
    shapes: str | None = setting(
        None,
        'JSON file of cases: {"cases": [{"name", "requests": [{"query_len", "kv_len", '
        '"count", "chunked", "num_draft_tokens"}]}]}',
    )
    decode_batches: str | None = setting(
        None, "also measure decode steps with these numbers of requests, such as 1,8,32"
    )
    decode_contexts: str = setting("512", "context lengths of these decode steps, such as 512,4096")
    prefill_tokens: str | None = setting(
        None, "also measure prefill steps of these lengths, such as 128,2048"
    )
    prefill_contexts: str = setting(
        "0", "context lengths before these prefill steps, such as 0,4096"
    )
    iters: int = setting(20, "number of replays per sample", low=1)
    samples: int = setting(5, "number of samples; the result is their median", low=1)
    profile_dir: str | None = setting(
        None, "folder for a trace of each case; also prints the time by operator class"
    )
    plot: str | None = setting(None, "PNG file for a heat map of the decode and prefill steps")
    output_json: str | None = setting(None, "output file of the result; `bench simulate` reads it")

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.cases:
            raise InputError("--case", "requires at least one case", "such as decode=32*1@8192")

    @property
    def cases(self) -> list[StepCase]:
        """The cases of all flags together. Raises InputError."""
        found = [StepCase.parse(each) for each in self.case]
        if self.shapes is not None:
            found += _read_shapes(self.shapes)
        if self.decode_batches is not None:
            found += decode_cases(numbers(self.decode_batches), numbers(self.decode_contexts))
        if self.prefill_tokens is not None:
            found += prefill_cases(numbers(self.prefill_tokens), numbers(self.prefill_contexts))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """Settings of `bench compare`: the second of two results of the same benchmark."""

    b: str = setting("", "the result to compare with", positional=True)


def numbers(text: str) -> list[int]:
    """Parse a list such as 1,8,32. Raises InputError."""
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise InputError(
            "numbers",
            f"expected numbers such as 1,8,32, found {text!r}",
            "separate whole numbers by commas",
        ) from None


def _read_shapes(path: str) -> list[StepCase]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return [
            StepCase(
                name=case["name"],
                requests=tuple(CaseRequests(**each) for each in case["requests"]),
            )
            for case in content["cases"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            path,
            f"expected a file of cases: {one_line(error)}",
            'write {"cases": [{"name": ..., "requests": [...]}]}',
        ) from None
