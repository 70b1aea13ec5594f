"""How far a quantized model's logits are from its float model's. Knows models, not formats."""

from dataclasses import dataclass
from pathlib import Path

import torch

from formats.errors import InputError

NUM_TOKENS = 256
# Mean KL divergence in nats above which the checkpoint is called broken: a sound 2-bit model stays
# under 1, shifted zeros or swapped layers give several.
MAX_DIVERGENCE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Over the same random tokens, predicted by both models."""

    tokens: int
    relative_error: float  # ||quantized - float|| / ||float|| of the logits
    divergence: float  # mean KL(float || quantized) in nats
    same_top_token: float  # share of positions

    @property
    def ok(self) -> bool:
        return self.divergence <= MAX_DIVERGENCE

    def to_text(self) -> str:
        verdict = "" if self.ok else ": this is another model, or a broken one"
        return (
            f"against the float model, {self.tokens} random tokens: logits differ by"
            f" {100 * self.relative_error:.2f} %, KL divergence {self.divergence:.4f} nats,"
            f" same top token in {100 * self.same_top_token:.1f} %{verdict}"
        )


def compare_models(
    quantized: str | Path, reference: str | Path, device: str = "auto"
) -> Comparison:
    """Load one model after the other and compare. Raises InputError where they do not match."""
    from qserve.llm import LLM

    logits = []
    token_ids: list[int] = []
    for folder in (reference, quantized):
        llm = LLM(str(folder), device=device, max_model_len=NUM_TOKENS, dtype="float32")
        if not token_ids:
            vocabulary = llm.engine.model_config.vocab_size
            generator = torch.Generator().manual_seed(0)
            token_ids = torch.randint(0, vocabulary, (NUM_TOKENS,), generator=generator).tolist()
        elif llm.engine.model_config.vocab_size != vocabulary:
            raise InputError(
                str(reference),
                f"has {vocabulary} tokens, {folder} has {llm.engine.model_config.vocab_size}",
                "give the float model that was quantized",
            )
        logits.append(llm.logits(token_ids).float().cpu())
        del llm
    float_TV, quantized_TV = logits
    if not torch.isfinite(quantized_TV).all():
        raise InputError(str(quantized), "its logits contain NaN or infinity")
    divergence = torch.nn.functional.kl_div(
        quantized_TV.log_softmax(-1), float_TV.log_softmax(-1), log_target=True, reduction="none"
    )
    return Comparison(
        tokens=NUM_TOKENS,
        relative_error=float((quantized_TV - float_TV).norm() / float_TV.norm()),
        divergence=float(divergence.sum(-1).mean()),
        same_top_token=float((quantized_TV.argmax(-1) == float_TV.argmax(-1)).float().mean()),
    )
