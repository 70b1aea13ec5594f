"""`qserve inspect --deep`: compare the logits of a quantized model with its float model.

Logits on random tokens show whether the files are intact; logits on a window of held-out text show
how good the model is. The tolerance depends on the bits: a correct 2-bit model may be as far from
the float model as a broken 4-bit one. If the distance is large, it is therefore judged relative to
that of the float model rounded to nearest in the same schemes.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from calibrate.quality.agreement import Agreement, AgreementSum
from calibrate.quality.evaluation import HELD_OUT, HELD_OUT_NAME
from calibrate.texts.documents import read_texts
from calibrate.texts.evaluate import make_windows, text_opening
from formats.errors import InputError
from formats.in_memory.weights import round_to_nearest
from formats.quant_config import QuantConfig
from qserve.model.blocks.linear import FloatLinear

NUM_TOKENS = 256
# Mean KL divergence in nats below which no model counts as broken. Correct models of 4 and 8 bits
# stay far below it; zero points off by one, or misplaced groups, give several nats.
ALWAYS_FINE = 1.0
# Limit relative to plain rounding. On docs-5m at 2 to 4 bits, correct files have 0.8 to 1.4 times
# the divergence of rounding; files with zero points off by one, or misplaced groups or inputs, have
# 2.6 to 39 times.
TIMES_ROUNDING = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of comparing both models on random tokens and on a text."""

    tokens: int
    relative_error: float  # ||quantized - float|| / ||float|| of the logits
    divergence: float  # mean KL(float || quantized) in nats
    same_top_token: float  # fraction of positions
    rounding_divergence: float | None = None  # divergence of plain rounding; None: not needed
    on_text: Agreement | None = None  # on held-out text; None: no usable tokenizer
    quantized_reference: str | None = None  # the other model, if it is no float model

    @property
    def limit(self) -> float:
        """Divergence in nats above which the model counts as broken."""
        return max(ALWAYS_FINE, TIMES_ROUNDING * (self.rounding_divergence or 0.0))

    @property
    def ok(self) -> bool:
        return self.divergence <= self.limit

    def to_text(self) -> str:
        against = "against the float model"
        if self.quantized_reference is not None:
            against = f"against {self.quantized_reference}, which is quantized too"
        text = (
            f"{against}, {self.tokens} random tokens: logits differ by"
            f" {100 * self.relative_error:.2f} %, KL divergence {self.divergence:.4f} nats,"
            f" same top token in {100 * self.same_top_token:.1f} %"
        )
        if self.rounding_divergence is not None:
            text += (
                f"; the float model rounded to nearest in the same bits:"
                f" {self.rounding_divergence:.4f} nats"
            )
        if not self.ok:
            text += ": this is a different model, or a broken one"
        if self.on_text is None:
            return text
        found = self.on_text
        return (
            f"{text}\n{against}, {found.tokens} tokens of {HELD_OUT_NAME}: perplexity"
            f" {found.reference_perplexity:.2f} -> {found.perplexity:.2f}, KL divergence"
            f" {found.divergence:.4f} nats, same top token in {100 * found.same_top_token:.1f} %"
        )


def compare_models(
    quantized: str | Path, reference: str | Path, device: str = "auto"
) -> Comparison:
    """Load one model after the other and compare them. Raises InputError if they do not match."""
    from qserve.llm import LLM

    def load(folder: str | Path) -> LLM:
        return LLM(str(folder), device=device, max_model_len=NUM_TOKENS, dtype="float32")

    llm = load(quantized)
    vocabulary, config = llm.engine.model_config.vocab_size, llm.engine.model_config.quant
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, vocabulary, (NUM_TOKENS,), generator=generator).tolist()
    window_S, opening = _held_out_window(quantized, vocabulary)
    quantized_TV = llm.logits(token_ids).float().cpu()
    text_TV = None if window_S is None else llm.logits(window_S.tolist())
    if not torch.isfinite(quantized_TV).all():
        raise InputError(
            str(quantized), "its logits contain NaN or infinity", "quantize the model again"
        )
    del llm
    llm = load(reference)
    if llm.engine.model_config.vocab_size != vocabulary:
        raise InputError(
            str(reference),
            f"has {llm.engine.model_config.vocab_size} tokens, {quantized} has {vocabulary}",
            "use the float model that was quantized",
        )
    float_TV = llm.logits(token_ids).float().cpu()
    is_quantized = llm.engine.model_config.quant is not None
    on_text = None
    if window_S is not None:
        total = AgreementSum()
        total.add(window_S, llm.logits(window_S.tolist()), text_TV, opening)
        on_text = total.result()
    divergence, rounding = kl_divergence(float_TV, quantized_TV), None
    if divergence > ALWAYS_FINE and config is not None:
        round_linears_(llm.engine.runner.decoder, config)
        rounding = kl_divergence(float_TV, llm.logits(token_ids).float().cpu())
    return Comparison(
        tokens=NUM_TOKENS,
        relative_error=float((quantized_TV - float_TV).norm() / float_TV.norm()),
        divergence=divergence,
        same_top_token=float((quantized_TV.argmax(-1) == float_TV.argmax(-1)).float().mean()),
        rounding_divergence=rounding,
        on_text=on_text,
        quantized_reference=str(reference) if is_quantized else None,
    )


def _held_out_window(
    folder: str | Path, vocabulary: int
) -> tuple[torch.Tensor | None, tuple[int, ...]]:
    """Return a window of held-out text, or None without a usable tokenizer, and the token ids that
    are not counted.
    """
    from qserve.text.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer(str(folder))
    except InputError:
        return None, ()
    opening = text_opening(tokenizer)
    (window_S,) = make_windows(
        read_texts(str(HELD_OUT)),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.bos_token_id,
        NUM_TOKENS,
        1,
        opening=opening,
        source=HELD_OUT_NAME,
    )
    return (None if int(window_S.max()) >= vocabulary else window_S), opening


def kl_divergence(float_TV: torch.Tensor, other_TV: torch.Tensor) -> float:
    """Mean KL(float || other) over the tokens, in nats."""
    divergence_TV = torch.nn.functional.kl_div(
        other_TV.log_softmax(-1), float_TV.log_softmax(-1), log_target=True, reduction="none"
    )
    return float(divergence_TV.sum(-1).mean())


def round_linears_(decoder: torch.nn.Module, config: QuantConfig) -> None:
    """Round a float decoder's weights to nearest, with the schemes of `config`, in place."""
    for linear in decoder.layers.modules():
        if not isinstance(linear, FloatLinear):
            continue
        scheme = config.scheme_for(linear.names[0])
        if scheme is not None:
            weight = linear.weight
            weight.copy_(round_to_nearest(weight, scheme.weight).dequantize(weight.dtype))
