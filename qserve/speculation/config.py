"""SpeculativeConfig: what --speculative-config says. The keys are vLLM's. Loads no torch."""

import difflib
import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from formats.errors import InputError

FLAG = "--speculative-config"
METHODS = ("ngram", "suffix", "mtp", "draft_model", "eagle", "eagle3", "medusa")
WITHOUT_MODEL, WITH_MODEL = METHODS[:2], METHODS[3:]  # mtp: the served one's, or another's
MAX_TOKENS = 128
DEFAULT_TOKENS = 3
LEVELS = (1, 3, 5, 7)  # what adaptive depth chooses from, up to num_speculative_tokens
MAX_ROWS = 256
# What vLLM takes as well and what is not here, and what to do about it.
NOT_HERE = {
    "draft_tensor_parallel_size": "a drafter runs on every rank as it is; leave it out",
    "quantization": "the drafter's folder says it; leave it out",
    "revision": "give a folder as model",
    "attention_backend": "see --kernel attention=NAME",
    "disable_padded_drafter_batch": "drafters always run padded; leave it out",
    "parallel_drafting": "drafters of this kind are not supported",
    "use_heterogeneous_vocab": "use a drafter with the model's tokenizer",
    "draft_lm_head_quantization": "quantize the drafter's folder: qserve quantize",
    "enable_adaptive_verification": "see adaptive",
    "dspark_draft_topk": "drafters of this kind are not supported",
}
REJECTION_METHODS = {"exact": "exact", "standard": "rejection", "synthetic": "synthetic"}
SAMPLE_METHODS = ("coupled", "greedy")
ACCEPTANCES = ("exact", "rejection", "typical", "synthetic")
BY_ROW = ACCEPTANCES[1:3]  # drafts are judged by what each row's token is drawn from
POSTERIOR = {"posterior_threshold": 0.09, "posterior_alpha": 0.3}  # Medusa's own


def _key(default: Any, help: str, low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Which drafter, and how far it looks ahead."""

    method: str
    model: str | None = _key(None, "the drafter's folder; mtp: the model's own, if not given")
    num_speculative_tokens: int = _key(DEFAULT_TOKENS, "drafts of one step", 1, MAX_TOKENS)
    prompt_lookup_min: int = _key(5, "ngram: fewest tokens that must agree", 1)
    prompt_lookup_max: int = _key(5, "ngram: most tokens that are compared", 1)
    suffix_decoding_max_tree_depth: int = _key(24, "suffix: most tokens that are compared", 2)
    suffix_decoding_max_cached_requests: int = _key(10000, "suffix: past outputs kept", 0)
    suffix_decoding_max_spec_factor: float = _key(1.0, "suffix: drafts for each agreeing token", 0)
    suffix_decoding_min_token_prob: float = _key(0.1, "suffix: drafts less sure are left out", 0, 1)
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = _key(
        (), "[[first, last, drafts], ...] by requests of a step, the first from 1"
    )
    adaptive: bool = _key(True, "fewer drafts where more would cost more than they bring")
    draft_sample_method: str = _key("coupled", f"one of {', '.join(SAMPLE_METHODS)}")
    acceptance: str = _key("exact", f"one of {', '.join(ACCEPTANCES)}")
    posterior_threshold: float | None = _key(
        None, "typical: a draft of such a probability passes (0.09)", 0, 1
    )
    posterior_alpha: float | None = _key(
        None, "typical: and one of so much of exp(-entropy) (0.3)", 0, 1
    )
    synthetic_acceptance_rates: tuple[float, ...] = _key(
        (), "synthetic: for each position the share of drafts that pass as far"
    )
    synthetic_acceptance_length: float = _key(
        0.0, "synthetic: tokens of a verify of num_speculative_tokens drafts, in place of rates", 1
    )

    @property
    def subject(self) -> str:
        return f"{FLAG} {self.method}"

    @classmethod
    def parse(cls, text: str, acceptance: str = "exact") -> "SpeculativeConfig":
        """Of a JSON object. Raises InputError, which names an unknown key and the nearest known.

        `acceptance`: what --spec-acceptance says, where that is not the default.
        """
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise InputError(FLAG, f"expected a JSON object, found {text!r}")
        return cls.of(found, acceptance)

    @classmethod
    def of(cls, found: dict[str, Any], acceptance: str = "exact") -> "SpeculativeConfig":
        """Raises InputError."""
        found = {name: value for name, value in found.items() if value is not None}
        method = found.pop("rejection_sample_method", None)  # vLLM's name of three of these
        if method is not None:
            if method not in REJECTION_METHODS:
                expected = f"expected one of {', '.join(REJECTION_METHODS)}, found {method!r}"
                raise InputError(f"{FLAG} rejection_sample_method", expected)
            found["acceptance"] = REJECTION_METHODS[method]
        if acceptance != "exact" and found.setdefault("acceptance", acceptance) != acceptance:
            raise InputError(
                f"--spec-acceptance {acceptance}",
                f"{FLAG} says {found['acceptance']!r:.80}",
                "leave one of them out",
            )
        known = {each.name: each for each in fields(cls)}
        for name in found:
            if name in NOT_HERE:
                raise InputError(FLAG, f"{name} is a key of vLLM that is not here", NOT_HERE[name])
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, 0)
                raise InputError(FLAG, f"has the unknown key {name!r}", f"did you mean {near[0]}?")
        for name, value in found.items():
            found[name] = _checked(known[name], value)
        if "synthetic_acceptance_length" in found:
            found["synthetic_acceptance_rates"] = _rates(
                found["synthetic_acceptance_length"],
                found.get("num_speculative_tokens", DEFAULT_TOKENS),
            )
        if "method" not in found:
            found["method"] = guess_method(found.get("model"))
        lookup = [f"prompt_lookup_{end}" for end in ("min", "max")]
        given = [name for name in lookup if name in found]
        if len(given) == 1:  # the other is equal
            found |= dict.fromkeys(lookup, found[given[0]])
        return cls(**found)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            expected = f"expected one of {', '.join(METHODS)}"
            raise InputError(f"{FLAG} method", f"{expected}, found {self.method!r}")
        if self.method in WITH_MODEL and self.model is None:
            raise InputError(self.subject, "needs a drafter", "give its folder as model")
        if self.method in WITHOUT_MODEL and self.model is not None:
            raise InputError(self.subject, "takes no model", "leave model out")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise InputError(
                f"{FLAG} prompt_lookup_min",
                f"expected at most prompt_lookup_max ({self.prompt_lookup_max}), found"
                f" {self.prompt_lookup_min}",
            )
        for name, choices in (("draft_sample_method", SAMPLE_METHODS), ("acceptance", ACCEPTANCES)):
            value = getattr(self, name)
            if value not in choices:
                expected = f"expected one of {', '.join(choices)}"
                raise InputError(f"{FLAG} {name}", f"{expected}, found {value!r}")
        for name in POSTERIOR:
            if self.acceptance != "typical" and getattr(self, name) is not None:
                raise InputError(
                    f"{FLAG} {name}",
                    f"is of typical acceptance, found {self.acceptance}",
                    "give --spec-acceptance typical, or leave it out",
                )
        self._check_table()
        rates = self.synthetic_acceptance_rates
        if (self.acceptance == "synthetic") != bool(rates):
            raise InputError(
                f"{FLAG} synthetic_acceptance_rates",
                "expected with acceptance synthetic, and not without",
            )
        falling = all(1 >= a >= b >= 0 for a, b in zip(rates, rates[1:] or rates, strict=False))
        if rates and (len(rates) < self.num_speculative_tokens or not falling):
            raise InputError(
                f"{FLAG} synthetic_acceptance_rates",
                f"expected a share for each of {self.num_speculative_tokens} positions, none"
                f" greater than the one before it, found {list(rates)}",
            )

    def _check_table(self) -> None:
        expected_first = 1
        for row in self.num_speculative_tokens_per_batch_size:
            first, last, count = row
            if first != expected_first or last < first or not 0 <= count <= MAX_TOKENS:
                raise InputError(
                    f"{FLAG} num_speculative_tokens_per_batch_size",
                    f"expected rows [first, last, drafts] that follow each other from 1 on, found"
                    f" {list(row)}",
                )
            expected_first = last + 1

    @property
    def judges_by_row(self) -> bool:
        """Whether drafts are judged by what the token of each row is drawn from."""
        return self.acceptance in BY_ROW

    @property
    def posterior(self) -> tuple[float, float]:
        """Threshold and alpha of typical acceptance."""
        stated = {name: getattr(self, name) for name in POSTERIOR}
        return tuple(POSTERIOR[name] if each is None else each for name, each in stated.items())

    @property
    def draws_drafts(self) -> bool:
        """Whether what a draft was drawn from must be kept."""
        return self.acceptance == "rejection" and self.draft_sample_method != "greedy"

    @property
    def depths(self) -> tuple[int, ...]:
        """Numbers of drafts that steps hold, but for 0, the least first."""
        table = [row[2] for row in self.num_speculative_tokens_per_batch_size]
        most = self.most_tokens
        levels = [each for each in LEVELS if each < most and self.adaptive and not table]
        return tuple(sorted({*levels, *table, most} - {0}))

    @property
    def max_rows(self) -> int:
        """Rows of a step whose requests have drafts: beyond, they have fewer, or none.

        A product of as many rows has no weights left to wait for, and each row costs its own.
        """
        table = self.num_speculative_tokens_per_batch_size
        rows = [last * (1 + count) for _, last, count in table if count]
        return max([*rows, MAX_ROWS, 1 + self.most_tokens])

    @property
    def most_tokens(self) -> int:
        """Drafts that a request may have at once."""
        table = self.num_speculative_tokens_per_batch_size
        return max((row[2] for row in table), default=self.num_speculative_tokens)


def guess_method(model: str | None) -> str:
    """What a drafter's folder holds. Raises InputError where there is none."""
    if model is None:
        raise InputError(FLAG, "names no method", f"give one of {', '.join(METHODS)}")
    try:
        values = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        values = {}
    if not isinstance(values, dict):
        values = {}
    architectures = " ".join(map(str, values.get("architectures") or ()))
    said = f"{values.get('speculators_model_type', '')} {values.get('model_type', '')}"
    said = f"{said} {architectures}".lower()
    if "medusa_num_heads" in values or "medusa" in said:
        return "medusa"
    if "eagle3" in said or "draft_vocab_size" in values:
        return "eagle3"
    if "eagle" in said:
        return "eagle"
    name = Path(model).name.lower()
    for method in ("eagle3", "eagle", "medusa"):
        if method in name.replace("eagle-3", "eagle3"):
            return method
    from formats.heads.folder import kind_of_folder  # loads torch

    # the first EAGLE heads have a plain Llama config: their tensors tell
    return kind_of_folder(model) or "draft_model"


def _rates(length: float, count: int) -> tuple[float, ...]:
    """Shares of each position, the same at each given those before, whose sum is length - 1."""
    if not 1 <= length <= 1 + count:
        raise InputError(
            f"{FLAG} synthetic_acceptance_length", f"expected 1 to {1 + count}, found {length}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        if sum(share**k for k in range(1, count + 1)) < length - 1:
            low = share
        else:
            high = share
    return tuple(high**k for k in range(1, count + 1))


def _checked(known: Any, value: Any) -> Any:
    """A value of the field's type and range. Raises InputError."""
    subject, low, high = f"{FLAG} {known.name}", None, None
    if known.metadata:
        low, high = known.metadata["low"], known.metadata["high"]
    kind = float if known.type == float | None else known.type
    if kind in (int, float):
        numbers = (int, float) if kind is float else (int,)
        if type(value) not in numbers or not math.isfinite(value):
            raise InputError(subject, f"expected a number, found {value!r}")
        if (low is not None and value < low) or (high is not None and value > high):
            expected = f"{low} or more" if high is None else f"{low} to {high}"
            raise InputError(subject, f"expected {expected}, found {value}")
        return kind(value)
    if kind is bool:
        if type(value) is not bool:
            raise InputError(subject, f"expected true or false, found {value!r}")
        return value
    if known.name.startswith("synthetic"):
        if not isinstance(value, list) or not all(type(each) in (int, float) for each in value):
            raise InputError(subject, f"expected a list of numbers, found {value!r}")
        return tuple(map(float, value))
    if known.name.endswith("per_batch_size"):
        rows = value if isinstance(value, list) else [None]
        for row in rows:
            if not (isinstance(row, list) and [type(each) for each in row] == [int] * 3):
                raise InputError(subject, f"expected a list of [first, last, drafts], found {row}")
        return tuple(map(tuple, rows))
    if type(value) is not str:
        raise InputError(subject, f"expected a text, found {value!r}")
    return value
