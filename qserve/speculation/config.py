"""SpeculativeConfig: the settings of --speculative-config. The keys are vLLM's."""

import difflib
import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from formats.errors import InputError
from qserve.errors import LEAVE_OUT

FLAG = "--speculative-config"
METHODS = (
    *("ngram", "suffix", "mtp", "draft_model", "eagle", "eagle3", "peagle", "medusa"),
    *("dflash", "dspark"),
)
# mtp works without `model` (a layer of the served model), and with it
WITHOUT_MODEL, WITH_MODEL = METHODS[:2], METHODS[3:]
PARALLEL = ("peagle", "dflash", "dspark")  # methods that draft all tokens in one pass
MAX_TOKENS = 128
DEFAULT_TOKENS = 3
LEVELS = (1, 3, 5, 7)  # numbers of drafts that adaptive speculation tries
MAX_ROWS = 256
# Keys of vLLM that are not supported -> what to do instead.
NOT_HERE = {
    "draft_tensor_parallel_size": "a drafter runs unsharded on every rank; remove it",
    "quantization": "the drafter's folder determines it; remove it",
    "revision": "write it into model: ORG/NAME@REVISION",
    "attention_backend": "see --kernel attention=NAME",
    "disable_padded_drafter_batch": "drafters always run padded; remove it",
    "use_heterogeneous_vocab": "use a drafter with the model's tokenizer",
    "draft_lm_head_quantization": "quantize the drafter's folder: qserve quantize",
    "enable_adaptive_verification": "see adaptive",
    "dspark_draft_topk": "drafts are drawn from all tokens; remove it",
}
REJECTION_METHODS = {"exact": "exact", "standard": "rejection", "synthetic": "synthetic"}
SAMPLE_METHODS = ("coupled", "greedy")
ACCEPTANCES = ("exact", "rejection", "typical", "synthetic")
BY_ROW = ACCEPTANCES[1:3]  # methods that accept drafts by the distribution of the row's token
POSTERIOR = {"posterior_threshold": 0.09, "posterior_alpha": 0.3}  # defaults, as in Medusa


def _key(default: Any, help: str, low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculative decoding: the drafter, the number of drafts, the acceptance rule."""

    method: str
    model: str | None = _key(
        None, "the drafter's folder or hub name; mtp: default is the served model"
    )
    num_speculative_tokens: int = _key(DEFAULT_TOKENS, "draft tokens per step", 1, MAX_TOKENS)
    prompt_lookup_min: int = _key(5, "ngram: minimum number of matching tokens", 1)
    prompt_lookup_max: int = _key(5, "ngram: maximum number of compared tokens", 1)
    suffix_decoding_max_tree_depth: int = _key(24, "suffix: maximum number of compared tokens", 2)
    suffix_decoding_max_cached_requests: int = _key(10000, "suffix: number of past outputs kept", 0)
    suffix_decoding_max_spec_factor: float = _key(1.0, "suffix: drafts per matching token", 0)
    suffix_decoding_min_token_prob: float = _key(
        0.1, "suffix: minimum probability of a draft", 0, 1
    )
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = _key(
        (),
        "[[first, last, drafts], ...]: number of drafts for steps with first to last requests; the"
        " first row starts at 1",
    )
    image_embeddings: bool | None = _key(
        None,
        "eagle, eagle3: the head reads the embeddings of images, instead of their placeholder"
        " token; default: from the head's config.json",
    )
    adaptive: bool = _key(True, "use fewer drafts when more would not pay off")
    draft_sample_method: str = _key("coupled", f"one of {', '.join(SAMPLE_METHODS)}")
    acceptance: str = _key("exact", f"one of {', '.join(ACCEPTANCES)}")
    posterior_threshold: float | None = _key(
        None, "typical: accept drafts whose probability is above this (0.09)", 0, 1
    )
    posterior_alpha: float | None = _key(
        None, "typical: or above this multiple of exp(-entropy) (0.3)", 0, 1
    )
    synthetic_acceptance_rates: tuple[float, ...] = _key(
        (), "synthetic: per position, the share of verifies that accept the drafts up to it"
    )
    synthetic_acceptance_length: float = _key(
        0.0,
        "synthetic: mean tokens per verify of num_speculative_tokens drafts, instead of rates",
        1,
    )

    @property
    def subject(self) -> str:
        return f"{FLAG} {self.method}"

    @classmethod
    def parse(cls, text: str, acceptance: str = "exact") -> "SpeculativeConfig":
        """Parse a JSON object. Raises InputError, which suggests a known key for an unknown one.

        `acceptance`: value of --spec-acceptance.
        """
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise InputError(
                FLAG,
                f"expected a JSON object, found {text!r}",
                f'for example {FLAG} \'{{"method": "ngram"}}\'',
            )
        return cls.of(found, acceptance)

    @classmethod
    def of(cls, found: dict[str, Any], acceptance: str = "exact") -> "SpeculativeConfig":
        """Create the config from parsed keys. Raises InputError."""
        found = {name: value for name, value in found.items() if value is not None}
        # vLLM's key for the acceptance rule
        method = found.pop("rejection_sample_method", None)
        if method is not None:
            if method not in REJECTION_METHODS:
                expected = f"expected one of {', '.join(REJECTION_METHODS)}, found {method!r}"
                raise InputError(f"{FLAG} rejection_sample_method", expected, LEAVE_OUT)
            found["acceptance"] = REJECTION_METHODS[method]
        # vLLM's key for heads that draft in one pass; here the method implies it
        parallel = found.pop("parallel_drafting", None)
        if parallel is not None and type(parallel) is not bool:
            raise InputError(
                f"{FLAG} parallel_drafting",
                f"expected true or false, found {parallel!r}",
                LEAVE_OUT,
            )
        if parallel and found.get("method", "eagle3") == "eagle3":
            found["method"] = "peagle"
        if parallel and found.get("method") not in PARALLEL:
            raise InputError(
                f"{FLAG} parallel_drafting",
                f"is for method {', '.join(PARALLEL)}, found {found.get('method')}",
                "remove it",
            )
        if acceptance != "exact" and found.setdefault("acceptance", acceptance) != acceptance:
            raise InputError(
                f"--spec-acceptance {acceptance}",
                f"conflicts with acceptance {found['acceptance']!r:.80} in {FLAG}",
                "remove one of them",
            )
        known = {each.name: each for each in fields(cls)}
        for name in found:
            if name in NOT_HERE:
                raise InputError(
                    FLAG, f"{name} is a key of vLLM that is not supported", NOT_HERE[name]
                )
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
        if len(given) == 1:  # use the same value for both
            found |= dict.fromkeys(lookup, found[given[0]])
        return cls(**found)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            expected = f"expected one of {', '.join(METHODS)}"
            raise InputError(f"{FLAG} method", f"{expected}, found {self.method!r}", LEAVE_OUT)
        if self.method in WITH_MODEL and self.model is None:
            raise InputError(
                self.subject, "requires a drafter", "set model to its folder or hub name"
            )
        if self.method in WITHOUT_MODEL and self.model is not None:
            raise InputError(self.subject, "takes no model", "remove model")
        if self.image_embeddings is not None and self.method not in ("eagle", "eagle3"):
            raise InputError(
                f"{FLAG} image_embeddings",
                f"is for method eagle or eagle3, found {self.method}",
                "remove it",
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise InputError(
                f"{FLAG} prompt_lookup_min",
                f"expected at most prompt_lookup_max ({self.prompt_lookup_max}), found"
                f" {self.prompt_lookup_min}",
                "lower it, or raise prompt_lookup_max",
            )
        for name, choices in (("draft_sample_method", SAMPLE_METHODS), ("acceptance", ACCEPTANCES)):
            value = getattr(self, name)
            if value not in choices:
                expected = f"expected one of {', '.join(choices)}"
                raise InputError(f"{FLAG} {name}", f"{expected}, found {value!r}", LEAVE_OUT)
        for name in POSTERIOR:
            if self.acceptance != "typical" and getattr(self, name) is not None:
                raise InputError(
                    f"{FLAG} {name}",
                    f"requires typical acceptance, found {self.acceptance}",
                    "add --spec-acceptance typical, or remove it",
                )
        self._check_table()
        rates = self.synthetic_acceptance_rates
        if (self.acceptance == "synthetic") != bool(rates):
            raise InputError(
                f"{FLAG} synthetic_acceptance_rates",
                "is required with acceptance synthetic, and allowed only with it",
                "give both, or neither",
            )
        falling = all(1 >= a >= b >= 0 for a, b in zip(rates, rates[1:] or rates, strict=False))
        if rates and (len(rates) < self.num_speculative_tokens or not falling):
            raise InputError(
                f"{FLAG} synthetic_acceptance_rates",
                f"expected a share from 0 to 1 for each of {self.num_speculative_tokens} positions,"
                f" none greater than the one before, found {list(rates)}",
                "give one falling rate for each drafted token",
            )

    def _check_table(self) -> None:
        expected_first = 1
        for row in self.num_speculative_tokens_per_batch_size:
            first, last, count = row
            if first != expected_first or last < first or not 0 <= count <= MAX_TOKENS:
                raise InputError(
                    f"{FLAG} num_speculative_tokens_per_batch_size",
                    f"expected consecutive rows [first, last, drafts] starting at 1, found"
                    f" {list(row)}",
                    "for example [[1, 4, 5], [5, 32, 2]]",
                )
            expected_first = last + 1

    def make_speculation(self, *, max_model_len: int, looks_ahead: bool) -> Any:
        """Create the host side of speculation (engine/scheduling/speculation.py)."""
        from qserve.speculation.speculation import make_speculation  # needs the engine's types

        return make_speculation(self, max_model_len=max_model_len, looks_ahead=looks_ahead)

    def make_speculator(self, engine: Any, target: Any, *, max_model_len: int, ranks: Any) -> Any:
        """Create the device side of speculation for one rank (engine/runner/speculator.py).

        `engine`: EngineConfig. `target`: Decoder of the rank. Raises InputError or CheckpointError.
        """
        from qserve.speculation.speculator import make_speculator  # loads torch

        return make_speculator(self, engine, target, max_model_len=max_model_len, ranks=ranks)

    @property
    def judges_by_row(self) -> bool:
        """True if drafts are accepted by the distribution of the row's token."""
        return self.acceptance in BY_ROW

    @property
    def posterior(self) -> tuple[float, float]:
        """Threshold and alpha of typical acceptance."""
        stated = {name: getattr(self, name) for name in POSTERIOR}
        return tuple(POSTERIOR[name] if each is None else each for name, each in stated.items())

    @property
    def draws_drafts(self) -> bool:
        """True if drafts are sampled and their distributions must be kept, for rejection."""
        return self.acceptance == "rejection" and self.draft_sample_method != "greedy"

    @property
    def depths(self) -> tuple[int, ...]:
        """Possible numbers of drafts per request, ascending, without 0."""
        table = [row[2] for row in self.num_speculative_tokens_per_batch_size]
        most = self.most_tokens
        levels = [each for each in LEVELS if each < most and self.adaptive and not table]
        return tuple(sorted({*levels, *table, most} - {0}))

    @property
    def max_rows(self) -> int:
        """Maximum number of rows of a step with drafts. With more requests, each gets fewer drafts.

        With more rows, matrix products are no longer memory-bound, so each draft adds cost.
        """
        table = self.num_speculative_tokens_per_batch_size
        rows = [last * (1 + count) for _, last, count in table if count]
        return max([*rows, MAX_ROWS, 1 + self.most_tokens])

    @property
    def most_tokens(self) -> int:
        """Maximum number of drafts of a request."""
        table = self.num_speculative_tokens_per_batch_size
        return max((row[2] for row in table), default=self.num_speculative_tokens)


def guess_method(model: str | None) -> str:
    """Return the method for the head or model in a drafter's folder.

    Raises InputError if there is no folder.
    """
    if model is None:
        raise InputError(FLAG, "has no method", f"set method to one of {', '.join(METHODS)}")
    try:
        values = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        values = {}
    if not isinstance(values, dict):
        values = {}
    from formats.heads.config import head_kind

    found = head_kind(values)
    if found in METHODS:
        return found
    architectures = " ".join(map(str, values.get("architectures") or ()))
    said = f"{values.get('speculators_model_type', '')} {values.get('model_type', '')}"
    said = f"{said} {architectures}".lower()
    for method in ("medusa", "eagle3", "eagle"):
        if method in said:
            return method
    name = Path(model).name.lower().replace("eagle-3", "eagle3").replace("p-eagle", "peagle")
    for method in ("peagle", "eagle3", "eagle", "medusa", "dflash", "dspark"):
        if method in name:
            return method
    from formats.heads.folder import kind_of_folder  # loads torch

    # The first EAGLE heads have a plain Llama config, so only their tensors identify them.
    return kind_of_folder(model) or "draft_model"


def _rates(length: float, count: int) -> tuple[float, ...]:
    """Return acceptance rates per position, with sum `length` - 1.

    The conditional rate is the same for all positions.
    """
    if not 1 <= length <= 1 + count:
        raise InputError(
            f"{FLAG} synthetic_acceptance_length",
            f"expected 1 to {1 + count}, found {length}",
            LEAVE_OUT,
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
    """Check a value's type and range, and convert it. Raises InputError."""
    subject, low, high = f"{FLAG} {known.name}", None, None
    if known.metadata:
        low, high = known.metadata["low"], known.metadata["high"]
    kind = float if known.type == float | None else known.type
    if kind in (int, float):
        numbers = (int, float) if kind is float else (int,)
        if type(value) not in numbers or not math.isfinite(value):
            raise InputError(subject, f"expected a number, found {value!r}", LEAVE_OUT)
        if (low is not None and value < low) or (high is not None and value > high):
            expected = f"{low} or more" if high is None else f"{low} to {high}"
            raise InputError(subject, f"expected {expected}, found {value}", LEAVE_OUT)
        return kind(value)
    if kind in (bool, bool | None):
        if type(value) is not bool:
            raise InputError(subject, f"expected true or false, found {value!r}", LEAVE_OUT)
        return value
    if known.name.startswith("synthetic"):
        if not isinstance(value, list) or not all(type(each) in (int, float) for each in value):
            raise InputError(
                subject,
                f"expected a list of numbers, found {value!r}",
                "for example [0.8, 0.6, 0.4]",
            )
        return tuple(map(float, value))
    if known.name.endswith("per_batch_size"):
        rows = value if isinstance(value, list) else [None]
        for row in rows:
            if not (isinstance(row, list) and [type(each) for each in row] == [int] * 3):
                raise InputError(
                    subject,
                    f"expected a list of [first, last, drafts], found {row}",
                    "for example [[1, 4, 5], [5, 32, 2]]",
                )
        return tuple(map(tuple, rows))
    if type(value) is not str:
        raise InputError(subject, f"expected a string, found {value!r}", LEAVE_OUT)
    return value
