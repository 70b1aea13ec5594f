"""DraftModelDrafter: a smaller model with the same tokenizer. It uses the target's page numbers.

Suffixes of tensor names: T tokens of the step, D requests that draft, V vocabulary.
"""

import json
from pathlib import Path

import torch

from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from qserve.model.decoder import Decoder
from qserve.model.loading.loader import load
from qserve.model.loading.weight_source import WeightSource
from qserve.model.model_config import ModelConfig
from qserve.speculation.draft_step import DraftStep
from qserve.speculation.drafter import BuildContext


class DraftModelDrafter:
    """Drafts with a smaller model. See DeviceDrafter."""

    aux_layers: tuple[int, ...] = ()
    looks_ahead = reads_images = False
    first_kv_heads = None
    extra_positions = 0

    def __init__(self, decoder: Decoder, vocab_size: int) -> None:
        """`vocab_size`: the target's vocabulary size. The drafter's may differ by padding."""
        self._decoder = decoder
        self._vocab_size = vocab_size
        self.attentions = tuple(layer.attention for layer in decoder.layers)

    def propose(self, step: DraftStep) -> torch.Tensor:
        """See DeviceDrafter. Runs a pass over all rows of the step, then one pass per draft."""
        self._decoder(step.batch.token_ids_T, step.batch, step.caches)
        tokens_D, drafts = step.tokens_D, []
        if not len(step.last_rows_D):
            return tokens_D.new_empty(0, step.num_drafts)
        for index in range(step.num_drafts):
            batch = step.ahead(tokens_D, 1 + index)
            hidden_DC = self._decoder(tokens_D, batch, step.caches)
            tokens_D = step.draw(self._logits(hidden_DC), index)
            drafts.append(tokens_D)
        return torch.stack(drafts, 1) if drafts else tokens_D.new_empty(len(tokens_D), 0)

    def _logits(self, hidden_DC: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary, [D, V]."""
        logits_DV = self._decoder.logits(hidden_DC)
        missing = self._vocab_size - logits_DV.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits_DV, (0, missing), value=-torch.inf)
        return logits_DV[:, : self._vocab_size]


def build(context: BuildContext) -> DraftModelDrafter:
    """Load the drafter from its folder. Raises InputError if it does not fit the target."""
    config = context.config
    check_tokenizer(config.subject, config.model, context.tokenizer_folder)
    model = ModelConfig.from_folder(
        config.model, activation_bits=context.activation_bits, is_drafter=True
    )
    if model.has_states:
        raise InputError(
            config.subject,
            f"expected a drafter without recurrent states, found {model.family.architecture},"
            " whose layers have states",
            "use another drafter",
        )
    if model.context.length < context.max_model_len:
        raise InputError(
            config.subject,
            f"{config.model} supports {model.context.length} tokens, but requests may have"
            f" {context.max_model_len}",
            "lower --max-model-len, or use another drafter",
        )
    if model.longest_window != context.target.config.longest_window:
        raise InputError(
            config.subject,
            f"the drafter's layers attend to {model.longest_window or 'all'} keys, the model's"
            f" layers to {context.target.config.longest_window or 'all'}",
            "use a drafter with the same window as the model, since both share page numbers",
        )
    decoder = load(
        model,
        WeightSource(CheckpointReader(config.model), model, context.device),
        device=context.device,
        dtype=context.dtype,
        max_model_len=context.max_model_len,
        kernels=context.kernels,
    )
    return DraftModelDrafter(decoder, context.target.config.vocab_size)


def check_tokenizer(subject: str, folder: str, target_folder: str) -> None:
    """Raise InputError unless the tokenizers in two folders have the same ids for all tokens."""
    found, expected = _vocabulary(folder), _vocabulary(target_folder)
    if found == expected:
        return
    if found is None or expected is None:
        missing = folder if found is None else target_folder
        raise InputError(
            subject,
            f"{missing} has no tokenizer.json",
            "copy the tokenizer.json of the original model",
        )
    differing = sorted(
        (text for text in found.keys() | expected.keys() if found.get(text) != expected.get(text)),
        key=lambda text: expected.get(text, 2**31),
    )
    text = differing[0]
    raise InputError(
        subject,
        f"expected the model's tokenizer, found another: {text!r} has the id {found.get(text)} in"
        f" {folder}, but {expected.get(text)} in the model's folder; {len(differing)} tokens"
        " differ",
        "use a drafter of the same family",
    )


def _vocabulary(folder: str) -> dict[str, int] | None:
    """Return token -> id, with added tokens; None if there is no tokenizer.json."""
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        return None
    values = json.loads(path.read_text())
    vocabulary = values.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: [token, score] by id
        vocabulary = {each[0]: index for index, each in enumerate(vocabulary)}
    added = {each["content"]: each["id"] for each in values.get("added_tokens", ())}
    return {**vocabulary, **added}
