"""Target model of a draft head, run by transformers: its states, logits and continuations.

Legend:
B: windows, S: tokens of a window, P: tokens of a prompt
C: hidden size, F: size of the concatenated auxiliary states, V: vocabulary
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calibrate.heads.eagle3 import TargetImages
from calibrate.heads.sampling import can_sample, continued, drawn
from formats.architecture.rope_types import axes_of_pairs
from formats.architecture.text_part import has_text_part
from formats.checkpoint import CONFIG, read_json
from formats.errors import InputError, one_line
from formats.heads.config import default_aux_layers

# Do not download, and do not run code from the folder.
LOCAL = {"trust_remote_code": False, "local_files_only": True}
# Config keys of the placeholder tokens of media, which are never generated
MEDIA_TOKENS = ("image_token_id", "image_token_index", "video_token_id")
NUM_AXES = 3  # of positions that heads read
Inputs = Mapping[str, torch.Tensor]  # arguments of transformers' model for one window


MUTUAL_PROMPTS = ("paligemma",)  # model types whose prompts see themselves in both directions


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutputs:
    """Hidden states and logits of a target for a batch of windows."""

    aux_BSF: torch.Tensor  # auxiliary hidden states: residuals before the chosen layers
    last_BSC: torch.Tensor  # after the last norm: the input of the output matrix
    logits_BSV: torch.Tensor
    images: TargetImages | None = None  # None: the windows have no images


LAST_NORMS = ("norm", "embedding_norm", "norm_f")  # the second is LFM2's, the third Nemotron-H's


class Target:
    """A frozen causal language model, or vision-language model."""

    def __init__(
        self, folder: str | Path, *, device: str, aux_layers: tuple[int, ...] | None = None
    ):
        """Load the model.

        `aux_layers`: number of layers before each auxiliary hidden state; None: those of EAGLE-3.

        Raises InputError if transformers cannot load it, or has no such layer.
        """
        import transformers
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

        self.folder, self.device = Path(folder), torch.device(device)
        config = read_json(self.folder / CONFIG)
        self.has_vision = has_text_part(config)
        if config.get("model_type") in MUTUAL_PROMPTS:
            raise InputError(
                str(folder),
                "attends to its whole prompt in both directions, and training texts have no prompt",
                "draft without a head: a draft model, or ngram",
            )
        loader = AutoModelForImageTextToText if self.has_vision else AutoModelForCausalLM
        # A CPU computes in float32, a GPU in the model's 16-bit dtype.
        dtype = "auto" if self.device.type == "cuda" else torch.float32
        try:
            model = loader.from_pretrained(folder, dtype=dtype, **LOCAL)
            self.tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
        except (OSError, ValueError, KeyError) as error:
            raise InputError(
                str(folder),
                f"transformers {transformers.__version__} cannot load it: {one_line(error)}",
                "give the float model with its tokenizer, or install a transformers that has it",
            ) from None
        self.model = model.to(self.device).train(False).requires_grad_(False)
        self.config = model.config.get_text_config()
        decoder = model.get_decoder()
        self._decoder = decoder if hasattr(decoder, "layers") else decoder.model  # Llama 4's
        norm = next(name for name in LAST_NORMS if hasattr(self._decoder, name))
        self._norm = self._decoder.get_submodule(norm)
        # Nemotron Nano Omni: only the text model knows its head.
        self._head = model.get_output_embeddings() or model.language_model.get_output_embeddings()
        num_layers = self.config.num_hidden_layers
        self.aux_layers = default_aux_layers(num_layers) if aux_layers is None else aux_layers
        places = [*self._decoder.layers, self._norm]
        if not all(0 <= layer < len(places) for layer in self.aux_layers):
            raise InputError(
                f"auxiliary layers {list(self.aux_layers)}",
                f"expected numbers from 0 to {num_layers}: the model has {num_layers} layers",
                "use other numbers",
            )
        self._states: dict[int, torch.Tensor] = {}
        for layer in self.aux_layers:
            places[layer].register_forward_pre_hook(
                lambda _, args, kwargs, layer=layer: self._states.__setitem__(
                    layer, args[0] if args else kwargs["hidden_states"]
                ),
                with_kwargs=True,
            )

    @property
    def embedding(self) -> torch.Tensor:
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> torch.Tensor:
        return self._head.weight

    @property
    def last_norm(self) -> torch.Tensor:
        return self._norm.weight

    @property
    def axes(self) -> dict[str, Any]:
        """Rope parameters for positions with three axes, or {} if positions are plain numbers."""
        rotary = getattr(self._decoder, "rotary_emb", None)
        sections = getattr(rotary, "mrope_section", None)
        if not sections or len(sections) != NUM_AXES:  # Hunyuan has four
            return {}
        positions_311 = torch.tensor([0, 1, 0], device=self.device).view(3, 1, 1)
        _, sin = rotary(self.embedding[:1, None], positions_311)
        rows = axes_of_pairs(sections, sum(sections), is_interleaved=True)
        turned = sin.flatten()[: len(rows)].ne(0).tolist()
        is_interleaved = sin.ndim == 3 and turned == [axis == 1 for axis in rows]
        return {"mrope_section": list(sections), "mrope_interleaved": is_interleaved}

    @torch.no_grad()
    def see(self, ids_BS: torch.Tensor) -> TargetOutputs:
        """Run the model on windows of token ids."""
        output = self._decoder(input_ids=ids_BS.to(self.device), use_cache=False)
        last_BSC = output.last_hidden_state
        aux = [self._states[layer] for layer in self.aux_layers]
        self._states.clear()
        return TargetOutputs(
            aux_BSF=torch.cat(aux, -1) if aux else last_BSC[..., :0],
            last_BSC=last_BSC,
            logits_BSV=self._logits(last_BSC),
        )

    @torch.no_grad()
    def see_images(self, windows: Sequence[tuple[Inputs, torch.Tensor]]) -> TargetOutputs:
        """Run the model on windows of equal length.

        `windows`: for each one the arguments of the model, and the mask of image tokens.
        """
        seen: dict[str, Any] = {}
        hooks = [
            self._decoder.register_forward_pre_hook(
                lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True
            ),
            self._decoder.register_forward_hook(
                lambda _, args, output: seen.update(last_BSC=output.last_hidden_state)
            ),
        ]
        found = []
        try:
            for inputs, is_image_S in windows:
                found.append(self._see_images(inputs, is_image_S, seen))
        finally:
            for hook in hooks:
                hook.remove()
        positions = [each.images.positions_3BS for each in found]
        if any(each is not None for each in positions):
            plain_3BS = torch.arange(len(windows[0][1]), device=self.device).expand(3, 1, -1)
            positions = [plain_3BS if each is None else each for each in positions]
        return TargetOutputs(
            aux_BSF=torch.cat([each.aux_BSF for each in found]),
            last_BSC=torch.cat([each.last_BSC for each in found]),
            logits_BSV=torch.cat([each.logits_BSV for each in found]),
            images=TargetImages(
                is_image_BS=torch.cat([each.images.is_image_BS for each in found]),
                rows_BSC=torch.cat([each.images.rows_BSC for each in found]),
                positions_3BS=None if positions[0] is None else torch.cat(positions, 1),
            ),
        )

    def _see_images(
        self, inputs: Inputs, is_image_S: torch.Tensor, seen: dict[str, Any]
    ) -> TargetOutputs:
        """Run one window. `seen` receives the arguments and the result of the decoder's call."""
        whole = getattr(self.model, "model", self.model)  # Llama 4 has no model without its head
        whole(**self._moved(inputs), use_cache=False)
        last_BSC = seen["last_BSC"]
        aux = [self._states[layer] for layer in self.aux_layers]
        self._states.clear()
        positions = seen.get("position_ids")
        has_axes = positions is not None and positions.ndim == 3
        return TargetOutputs(
            aux_BSF=torch.cat(aux, -1) if aux else last_BSC[..., :0],
            last_BSC=last_BSC,
            logits_BSV=self._logits(last_BSC),
            images=TargetImages(
                is_image_BS=is_image_S[None].to(self.device),
                rows_BSC=seen["inputs_embeds"],
                # A fourth row in front of the three axes belongs to the attention mask.
                positions_3BS=positions[-3:] if has_axes else None,
            ),
        )

    def _moved(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        return {
            name: each.to(self.device, self.embedding.dtype)
            if each.is_floating_point()
            else each.to(self.device)
            for name, each in inputs.items()
        }

    def _logits(self, last: torch.Tensor) -> torch.Tensor:
        logits = self._head(last)
        config: Any = self.config
        divisor = getattr(config, "logits_scaling", None)
        logits = logits if divisor is None else logits / divisor
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.no_grad()
    def continued_images(self, inputs: Inputs, length: int, *, temperature: float) -> torch.Tensor:
        """Return the prompt of one window with the model's continuation, [length]."""
        config = self.model.config
        media = [getattr(config, name, None) for name in MEDIA_TOKENS]
        missing = length - inputs["input_ids"].shape[1]
        found = self.model.generate(
            **self._moved(inputs),
            min_new_tokens=missing,
            max_new_tokens=missing,
            do_sample=temperature > 0,
            temperature=temperature or None,
            top_k=None,
            top_p=None,
            eos_token_id=None,
            suppress_tokens=[token for token in media if token is not None],
        )
        self._states.clear()
        return found[0]

    @torch.no_grad()
    def continued(
        self, prompts_BP: torch.Tensor, length: int, *, temperature: float = 1.0
    ) -> torch.Tensor:
        """Return prompts of equal length with the model's continuations, [B, length]."""
        from transformers import DynamicCache

        ids = prompts_BP.to(self.device)
        if can_sample(self.config):
            head = self._head
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
    """Yield shuffled batches of windows [B, S]. An incomplete last batch is dropped.

    If there are fewer windows than `size`, they form one batch.
    """
    order = torch.randperm(len(ids_WS), generator=torch.Generator().manual_seed(seed))
    for start in range(0, max(1, len(ids_WS) - size + 1), size):
        yield ids_WS[order[start : start + size]]
