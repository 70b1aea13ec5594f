"""StepTimes: estimates the duration of a step, by a fit to results of `bench forward`.

    seconds = products(T) + a * keys + b * pairs

T is the number of tokens of the step, or the number of rows of its CUDA graph. Between the measured
T, `products` is linear. Decodes read `keys`. Prompt tokens and the keys that they read are `pairs`.
One least-squares fit of the relative errors determines all parameters. Loads no torch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from formats.errors import InputError, one_line
from qserve.engine.scheduling.itl_control import StepLoad
from qserve.engine.scheduling.plan import StepPlan, load_of

KEYS, PAIRS = 1e5, 1e7  # units of keys and pairs, which give the factors similar magnitudes
GRAPH_ROWS = "graph_rows"  # key in the result of `bench forward`


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A model of the duration of steps."""

    token_counts: tuple[float, ...]  # the measured T in ascending order
    product_seconds: tuple[float, ...]  # products(T) for each of them
    key_seconds: float  # for KEYS keys
    pair_seconds: float  # for PAIRS pairs
    decode_rows: tuple[int, ...] = ()  # row counts of the graphs for decodes, ascending
    chunk_rows: tuple[int, ...] = ()  # row counts of the graphs for steps with prompts, ascending
    error: float = 0.0  # mean relative error of the fit

    @classmethod
    def fixed(cls, seconds: float) -> "StepTimes":
        """Return a model in which each step takes the same time."""
        return cls(
            token_counts=(1.0,), product_seconds=(seconds,), key_seconds=0.0, pair_seconds=0.0
        )

    @classmethod
    def read(cls, path: str) -> "StepTimes":
        """Fit to the result of `bench forward` in a file. Raises InputError."""
        try:
            result = json.loads(Path(path).read_text(encoding="utf-8"))
            rows = result.get(GRAPH_ROWS, {"decode": (), "chunk": ()})
            return cls.fit(result["cases"], tuple(rows["decode"]), tuple(rows["chunk"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                path,
                f"expected a result of bench forward: {one_line(error)}",
                "write one with `qserve bench forward --output-json FILE`",
            ) from None

    @classmethod
    def fit(
        cls,
        cases: Sequence[dict[str, Any]],
        decode_rows: tuple[int, ...] = (),
        chunk_rows: tuple[int, ...] = (),
    ) -> "StepTimes":
        """Fit to measured cases.

        The time of a whole step, with transfer of inputs and with sampling, is used if the case has
        it.
        """
        loads = [_load_of_case(case) for case in cases]
        tokens = [_padded(load, decode_rows, chunk_rows) for load in loads]
        seconds = np.array([case.get("step_us", case["median_us"]) for case in cases]) / 1e6
        knots = np.array(sorted(set(tokens)))
        columns = np.array([_features(*each, knots) for each in zip(loads, tokens, strict=True)])
        weighted = columns / seconds[:, None]
        factors, *_ = np.linalg.lstsq(weighted, np.ones(len(seconds)), rcond=None)
        if (factors[-2:] < 0).any():  # too few context lengths to fit both terms: leave them out
            factors[-2:] = 0
            factors[:-2], *_ = np.linalg.lstsq(weighted[:, :-2], np.ones(len(seconds)), rcond=None)
        errors = np.abs(columns @ factors / seconds - 1)
        return cls(
            token_counts=tuple(knots.tolist()),
            product_seconds=tuple(np.maximum(factors[:-2], 0).tolist()),
            key_seconds=float(factors[-2]),
            pair_seconds=float(factors[-1]),
            decode_rows=decode_rows,
            chunk_rows=chunk_rows,
            error=float(errors.mean()),
        )

    def of_plan(self, plan: StepPlan) -> float:
        return self.of_load(load_of(plan.chunks))

    def of_load(self, load: StepLoad) -> float:
        """Estimate a step's seconds. Above the measured token counts, the last slope is used."""
        tokens = _padded(load, self.decode_rows, self.chunk_rows)
        counts, seconds = self.token_counts, self.product_seconds
        if len(counts) > 1 and tokens > counts[-1]:
            slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
            products = seconds[-1] + slope * (tokens - counts[-1])
        else:
            products = float(np.interp(tokens, counts, seconds))
        others = (
            self.key_seconds * load.num_keys / KEYS + self.pair_seconds * load.num_pairs / PAIRS
        )
        return products + others


def _padded(load: StepLoad, decode_rows: tuple[int, ...], chunk_rows: tuple[int, ...]) -> float:
    """Return the row count of the smallest CUDA graph that fits a step; without one, its tokens."""
    tokens = load.num_prompt_tokens + load.num_decodes
    rows = chunk_rows if load.num_prompt_tokens else decode_rows
    return float(next((each for each in rows if each >= tokens), tokens))


def _features(load: StepLoad, tokens: float, knots: np.ndarray) -> np.ndarray:
    """Return the weight of each knot for a token count, then the keys and the pairs.

    Only the neighbouring knots have weights that are not 0.
    """
    tents = [np.interp(tokens, knots, row) for row in np.eye(len(knots))]
    return np.array([*tents, load.num_keys / KEYS, load.num_pairs / PAIRS])


def _load_of_case(case: dict[str, Any]) -> StepLoad:
    prompts = [each for each in case["requests"] if each["query_len"] > 1]
    decodes = [each for each in case["requests"] if each["query_len"] == 1]
    return StepLoad(
        num_prompt_tokens=sum(each["count"] * each["query_len"] for each in prompts),
        num_decodes=sum(each["count"] for each in decodes),
        num_keys=sum(each["count"] * (each["kv_len"] + 1) for each in decodes),
        num_pairs=sum(
            each["count"] * each["query_len"] * (2 * each["kv_len"] + each["query_len"]) // 2
            for each in prompts
        ),
    )
