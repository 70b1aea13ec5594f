"""Difference between the logits of a quantized model and its float model.

The tolerance depends on the bits: a correct 2-bit model may be as far away as a broken 4-bit one.
The reference is therefore the float model with its weights rounded to nearest in the same schemes.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from formats.errors import InputError
from formats.in_memory.weights import round_to_nearest
from formats.quant_config import QuantConfig
from qserve.model.blocks.linear import FloatLinear

NUM_TOKENS = 256
# Mean KL divergence in nats below which no model counts as broken: correct models of 4 and 8 bits
# stay far below; zero points off by one or misplaced groups give several.
ALWAYS_FINE = 1.0
# Limit relative to plain rounding. On docs-5m at 2 to 4 bits, correct files have 0.8 to 1.4 times
# the divergence of rounding; files with zero points off by one, or misplaced groups or inputs, have
# 2.6 to 39 times.
TIMES_ROUNDING = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result over the same random tokens, predicted by both models."""

    tokens: int
    relative_error: float  # ||quantized - float|| / ||float|| of the logits
    divergence: float  # mean KL(float || quantized) in nats
    same_top_token: float  # fraction of positions
    rounding_divergence: float | None = None  # of plain rounding; None: not needed

    @property
    def limit(self) -> float:
        """Divergence in nats above which the model counts as broken."""
        return max(ALWAYS_FINE, TIMES_ROUNDING * (self.rounding_divergence or 0.0))

    @property
    def ok(self) -> bool:
        return self.divergence <= self.limit

    def to_text(self) -> str:
        text = (
            f"against the float model, {self.tokens} random tokens: logits differ by"
            f" {100 * self.relative_error:.2f} %, KL divergence {self.divergence:.4f} nats,"
            f" same top token in {100 * self.same_top_token:.1f} %"
        )
        if self.rounding_divergence is not None:
            text += (
                f"; the float model rounded to nearest in the same bits:"
                f" {self.rounding_divergence:.4f} nats"
            )
        return text if self.ok else f"{text}: this is a different model, or a broken one"


def compare_models(
    quantized: str | Path, reference: str | Path, device: str = "auto"
) -> Comparison:
    """Load one model after the other and compare. Raises InputError if they do not match."""
    from qserve.llm import LLM

    def load(folder: str | Path) -> LLM:
        return LLM(str(folder), device=device, max_model_len=NUM_TOKENS, dtype="float32")

    llm = load(quantized)
    vocabulary, config = llm.engine.model_config.vocab_size, llm.engine.model_config.quant
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, vocabulary, (NUM_TOKENS,), generator=generator).tolist()
    quantized_TV = llm.logits(token_ids).float().cpu()
    if not torch.isfinite(quantized_TV).all():
        raise InputError(str(quantized), "its logits contain NaN or infinity")
    del llm
    llm = load(reference)
    if llm.engine.model_config.vocab_size != vocabulary:
        raise InputError(
            str(reference),
            f"has {llm.engine.model_config.vocab_size} tokens, {quantized} has {vocabulary}",
            "use the float model that was quantized",
        )
    float_TV = llm.logits(token_ids).float().cpu()
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
    )


def kl_divergence(float_TV: torch.Tensor, other_TV: torch.Tensor) -> float:
    """Mean KL(float || other) over the tokens, in nats."""
    divergence_TV = torch.nn.functional.kl_div(
        other_TV.log_softmax(-1), float_TV.log_softmax(-1), log_target=True, reduction="none"
    )
    return float(divergence_TV.sum(-1).mean())


def round_linears_(decoder: torch.nn.Module, config: QuantConfig) -> None:
    """Round a float decoder's weights to nearest in the schemes of `config`, in place."""
    for linear in decoder.layers.modules():
        if not isinstance(linear, FloatLinear):
            continue
        scheme = config.scheme_for(linear.names[0])
        if scheme is not None:
            weight = linear.weight
            weight.copy_(round_to_nearest(weight, scheme.weight).dequantize(weight.dtype))
