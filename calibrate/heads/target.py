"""Target model of a draft head, run by transformers: its states, logits and continuations.

Legend: B windows, S tokens of a window, C hidden size, F concatenated states, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calibrate.heads.sampling import can_sample, continued, drawn
from formats.errors import InputError, one_line
from formats.heads.config import usual_taps

# transformers fetches nothing and runs no code from the folder.
LOCAL = {"trust_remote_code": False, "local_files_only": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """States and logits of a target for a batch of windows."""

    taps_BSF: torch.Tensor  # auxiliary hidden states, the residuals before the tapped layers
    last_BSC: torch.Tensor  # after the last norm: the input of the output matrix
    logits_BSV: torch.Tensor


class Target:
    """A frozen causal language model."""

    def __init__(self, folder: str | Path, *, device: str, taps: tuple[int, ...] | None = None):
        """`taps`: number of layers before each auxiliary state; None: EAGLE-3's usual ones.

        Raises InputError.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.folder, self.device = Path(folder), torch.device(device)
        # A CPU computes in float32, a GPU in the model's own 16 bits.
        dtype = "auto" if self.device.type == "cuda" else torch.float32
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **LOCAL)
            self.tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
        except (OSError, ValueError, KeyError) as error:
            raise InputError(
                str(folder), f"transformers cannot load it: {one_line(error)}"
            ) from None
        self.model = model.to(self.device).train(False).requires_grad_(False)
        self.config = model.config.get_text_config()
        self._decoder = model.get_decoder()
        num_layers = self.config.num_hidden_layers
        self.taps = usual_taps(num_layers) if taps is None else taps
        places = [*self._decoder.layers, self._decoder.norm]
        if not all(0 <= tap < len(places) for tap in self.taps):
            raise InputError(f"taps {self.taps}", f"the model has {num_layers} layers")
        self._states: dict[int, torch.Tensor] = {}
        for tap in self.taps:
            places[tap].register_forward_pre_hook(
                lambda _, args, kwargs, tap=tap: self._states.__setitem__(
                    tap, args[0] if args else kwargs["hidden_states"]
                ),
                with_kwargs=True,
            )

    @property
    def embedding(self) -> torch.Tensor:
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> torch.Tensor:
        return self.model.get_output_embeddings().weight

    @property
    def last_norm(self) -> torch.Tensor:
        return self._decoder.norm.weight

    @torch.no_grad()
    def see(self, ids_BS: torch.Tensor) -> Seen:
        """Run windows of token ids."""
        output = self._decoder(input_ids=ids_BS.to(self.device), use_cache=False)
        last_BSC = output.last_hidden_state
        taps = [self._states[tap] for tap in self.taps]
        self._states.clear()
        return Seen(
            taps_BSF=torch.cat(taps, -1) if taps else last_BSC[..., :0],
            last_BSC=last_BSC,
            logits_BSV=self._logits(last_BSC),
        )

    def _logits(self, last: torch.Tensor) -> torch.Tensor:
        logits = self.model.get_output_embeddings()(last)
        config: Any = self.config
        divisor = getattr(config, "logits_scaling", None)
        logits = logits if divisor is None else logits / divisor
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.no_grad()
    def continued(
        self, prompts_BP: torch.Tensor, length: int, *, temperature: float = 1.0
    ) -> torch.Tensor:
        """Prompts of equal length with the model's continuations, [B, length], on the device."""
        from transformers import DynamicCache

        ids = prompts_BP.to(self.device)
        if can_sample(self.config):
            head = self.model.get_output_embeddings()
            self._states.clear()
            return continued(self._decoder, head, ids, length, temperature)
        cache, texts = DynamicCache(), [ids]
        while sum(part.shape[1] for part in texts) < length:
            output = self._decoder(input_ids=texts[-1], past_key_values=cache, use_cache=True)
            self._states.clear()
            logits_BV = self._logits(output.last_hidden_state[:, -1])
            texts.append(drawn(logits_BV, temperature)[:, None])
        return torch.cat(texts, 1)


def batches(ids_WS: torch.Tensor, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Shuffled batches of windows [B, S]; an incomplete last batch is dropped.

    Fewer windows than a batch form one batch.
    """
    order = torch.randperm(len(ids_WS), generator=torch.Generator().manual_seed(seed))
    for start in range(0, max(1, len(ids_WS) - size + 1), size):
        yield ids_WS[order[start : start + size]]
