"""Load a head's folder as a plain torch module, and measure its accuracy on windows.

Legend: B windows, S tokens of a window.
"""

from collections.abc import Iterator

import torch

from calibrate.heads.block import BlockModule, block_losses, even_anchors
from calibrate.heads.eagle3 import Eagle3Module, step_losses
from calibrate.heads.image_windows import HeadWindows
from calibrate.heads.medusa import MedusaModule, head_losses
from calibrate.heads.parallel import ParallelModule, parallel_losses
from calibrate.heads.target import Target
from formats.errors import InputError
from formats.heads import tensors as names
from formats.heads.block_config import DFLASH, DSPARK, BlockConfig
from formats.heads.config import EAGLE3, MEDUSA, PEAGLE
from formats.heads.folder import HeadFolder

NUM_STEPS = 3  # steps of an EAGLE-3 head; later steps read its own states, as when it drafts
NUM_DRAFTS = 7  # maximum drafts of a block
NUM_ANCHORS = 32  # blocks per window


class HeadModule:
    """A float head and its target, on one device."""

    def __init__(self, folder: HeadFolder, target: Target) -> None:
        """Raises InputError for a type of head without a module, or a head of another model."""
        self.folder, self.target = folder, target
        tensors = {
            name: folder.get(folder.stored(name)).to(target.device)
            for name in map(names.canonical, folder.entries)
        }
        self.draft_ids_U = None
        if names.TO_TARGET in tensors:
            offsets_U = tensors.pop(names.TO_TARGET).long()
            self.draft_ids_U = offsets_U + torch.arange(len(offsets_U), device=offsets_U.device)
        tensors.pop(names.IN_DRAFT, None)
        make = {
            EAGLE3: self._eagle3,
            PEAGLE: self._eagle3,
            MEDUSA: self._medusa,
            DFLASH: self._block,
            DSPARK: self._block,
        }.get(folder.config.kind)
        if make is None:
            raise InputError(
                str(folder.folder),
                f"heads of kind {folder.config.kind} cannot be calibrated",
                "use `recipe` rtn, which needs no data",
            )
        try:
            self.module = make(tensors)
        except RuntimeError as error:  # load_state_dict: shapes of another model
            raise InputError(
                str(folder.folder),
                f"does not fit the target model: {str(error).splitlines()[-1].strip()}",
                "give the model that the head was trained for as `target`",
            ) from None
        # A CPU computes in float32; a GPU in the target's 16 bits.
        self.dtype = target.embedding.dtype
        self.module.to(target.device, self.dtype).train(False).requires_grad_(False)

    def linear(self, name: str) -> torch.nn.Linear:
        """Return the linear with this canonical name."""
        inside = f"heads.{name}" if self.folder.config.kind == MEDUSA else name
        return self.module.get_submodule(inside)

    @torch.no_grad()
    def judged(self, windows: HeadWindows) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Run the windows and yield (loss, accuracy) of each step, draft or Medusa head."""
        ids_BS = windows.ids_WS.to(self.target.device)
        seen = windows.seen(self.target)
        if self.folder.config.kind == MEDUSA:
            yield from head_losses(self.module, seen.last_BSC.to(self.dtype), seen.logits_BSV)
            return
        aux_BSF, kind = seen.aux_BSF.to(self.dtype), self.folder.config.kind
        if kind == EAGLE3:
            yield from step_losses(
                self.module,
                ids_BS,
                aux_BSF,
                seen.logits_BSV,
                num_steps=NUM_STEPS,
                draft_ids_U=self.draft_ids_U,
                images=seen.images,
            )
            return
        num_drafts = NUM_DRAFTS
        if isinstance(self.folder.config, BlockConfig):
            num_drafts = min(NUM_DRAFTS, self.folder.config.max_drafts)
        # The row of the last draft, and the token that it predicts, must lie within the window.
        num_drafts = max(1, min(num_drafts, ids_BS.shape[1] - 3))
        anchors_A = even_anchors(ids_BS.shape[1] - 1, num_drafts, NUM_ANCHORS)
        yield from (parallel_losses if kind == PEAGLE else block_losses)(
            self.module,
            ids_BS,
            aux_BSF,
            seen.logits_BSV,
            anchors_A.to(ids_BS.device),
            num_drafts=num_drafts,
            draft_ids_U=self.draft_ids_U,
        )

    def _eagle3(self, tensors: dict[str, torch.Tensor]) -> Eagle3Module:
        embedding, config = tensors.pop(names.EMBEDDING, self.target.embedding), self.folder.config
        tensors.setdefault("lm_head.weight", self.target.head)
        made = ParallelModule if config.kind == PEAGLE else Eagle3Module
        module = made(config, embedding, _present(tensors))
        if config.kind == PEAGLE:  # a missing mask state means zeros
            zeros_F = torch.zeros(names.fc_inputs(config))
            tensors[names.MASK_HIDDEN] = tensors.get(names.MASK_HIDDEN, zeros_F).flatten()
        module.load_state_dict(tensors)
        return module

    def _block(self, tensors: dict[str, torch.Tensor]) -> BlockModule:
        embedding = tensors.pop(names.EMBEDDING, self.target.embedding)
        tensors.setdefault("lm_head.weight", self.target.head)
        for leaf in ("weight", "bias"):
            tensors.pop(f"{names.CONFIDENCE}.{leaf}", None)
        mask_C = tensors.pop(names.MASK_EMBEDDING, None)
        module = BlockModule(self.folder.config, embedding, _present(tensors))
        module.load_state_dict(tensors)
        if mask_C is not None and self.folder.config.kind == DFLASH:
            module.mask_embedding = mask_C.flatten()
        return module

    def _medusa(self, tensors: dict[str, torch.Tensor]) -> MedusaModule:
        config = self.folder.config
        last = tensors[f"0.{config.num_layers}.weight"]
        module = MedusaModule(last, config.num_heads, config.num_layers)
        module.heads.load_state_dict(tensors)
        return module


def _present(tensors: dict[str, torch.Tensor]) -> frozenset[str]:
    """Return the biases and per-head norms that exist, by the last part of the module's name."""
    parts = [name.split(".") for name in tensors if "." in name]
    present = {part[-2] for part in parts if part[-1] == "bias"}
    return frozenset(present | {part[-2] for part in parts if part[-2] in ("q_norm", "k_norm")})
