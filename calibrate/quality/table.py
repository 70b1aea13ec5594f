"""Text table of an Agreement."""

from calibrate.quality.agreement import Agreement
from formats.table import count_text, text_table

HEADER = ("model", "perplexity", "KL divergence", "same top token")


def agreement_table(found: Agreement, reference: str, model: str, text: str) -> str:
    """Format the perplexities of both models, and the model's distance from the reference."""
    rows = [
        (reference, f"{found.reference_perplexity:.4f}", "0", "100 %"),
        (
            model,
            f"{found.perplexity:.4f}",
            f"{found.divergence:.5f}",
            f"{100 * found.same_top_token:.2f} %",
        ),
    ]
    return (
        f"{text_table(HEADER, rows)}\n\n{count_text(found.windows, 'window')} of"
        f" {found.sequence_length} tokens of {text}; KL divergence in nats per token"
        f" from {reference}, largest {found.largest_divergence:.3f}"
    )
