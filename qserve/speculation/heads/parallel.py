"""P-EAGLE heads (arXiv 2602.01469): EAGLE-3's layers, which draft all tokens in one pass.

For positions after the newest token, token and target's states are not known yet. These rows get a
mask token and a learned state instead.

Suffixes of tensor names:

    T: rows of the step
    R: requests of the step
    C: hidden size
    D: requests that draft
    M: mask rows
    F: input size of `fc`
"""

from dataclasses import replace

import torch

from formats.errors import CheckpointError
from formats.heads import tensors as names
from formats.heads.config import PEAGLE, EagleConfig
from qserve.engine.step.device_step import Batch
from qserve.speculation.draft_step import DraftStep
from qserve.speculation.drafter import BuildContext
from qserve.speculation.heads.eagle3 import Eagle3Head, load_head, log_head
from qserve.speculation.heads.loading import HeadWeights, check_fits, open_head


class ParallelDrafter:
    """Drafts in one pass over the step's rows and K - 1 mask rows. See DeviceDrafter."""

    looks_ahead, reads_images = True, False
    first_kv_heads = None
    extra_positions = 0

    def __init__(
        self, head: Eagle3Head, aux_layers: tuple[int, ...], mask_state_C: torch.Tensor
    ) -> None:
        """Use a head.

        aux_layers: indices of the target's layers, see DeviceDrafter
        mask_state_C: state of mask rows
        """
        self.head, self.aux_layers, self.attentions = head, aux_layers, head.attentions
        self.mask_state_C = mask_state_C

    def propose(self, step: DraftStep) -> torch.Tensor:
        state_TC, D, K = self.head.start(step), len(step.last_rows_D), step.num_drafts
        if not D or not K:  # kernels require at least one row
            self.head(step.next_tokens_T, state_TC, step.batch, step.caches)
            return step.last_rows_D.new_zeros(D, K)
        tokens, batch = step.next_tokens_T, step.batch
        if K > 1:
            mask_token = self.head.config.mask_token_id
            masks_MD = step.last_rows_D.new_full((K - 1, D), mask_token)
            state_MC = self.mask_state_C.to(state_TC).expand(masks_MD.numel(), -1)
            batch = with_block(step, step.block(masks_MD, is_causal=True))
            tokens = torch.cat([masks_MD.flatten(), tokens])
            state_TC = torch.cat([state_MC, state_TC])
        _, read_TC = self.head(tokens, state_TC, batch, step.caches)
        num_masks = (K - 1) * D
        read = torch.cat([read_TC[num_masks + step.last_rows_D], read_TC[:num_masks]])
        return step.draw_all(self.head.logits(read).view(K, D, -1))


def with_block(step: DraftStep, block: Batch) -> Batch:
    """Return a batch with the rows of a block, then the rows of the step.

    The rows of rejected drafts write no keys, since the block's rows have the same positions.
    """
    batch = step.batch
    T, device = len(batch.token_ids_T), batch.token_ids_T.device
    ends_R = batch.query_starts_R1[1:].long()
    row_T = torch.arange(T, device=device)
    # A step may end with padding rows, which belong to no request.
    last_R1 = torch.full((len(ends_R) + 1,), T, device=device)
    last_R1[torch.searchsorted(ends_R, step.last_rows_D, right=True)] = step.last_rows_D
    is_rejected_T = row_T > last_R1[torch.searchsorted(ends_R, row_T, right=True)]
    starts_M, num_rows = block.query_starts_R1[:-1], len(block.token_ids_T)
    return replace(
        block,
        token_ids_T=torch.cat([block.token_ids_T, batch.token_ids_T]),
        positions_T=torch.cat([block.positions_T, batch.positions_T]),
        slots_T=torch.cat([block.slots_T, batch.slots_T.masked_fill(is_rejected_T, -1)]),
        block_tables_RX=torch.cat([block.block_tables_RX, batch.block_tables_RX]),
        query_starts_R1=torch.cat([starts_M, batch.query_starts_R1 + num_rows]),
        context_lengths_R=torch.cat([block.context_lengths_R, batch.context_lengths_R]),
        max_query_len=batch.max_query_len,
    )


def build(context: BuildContext) -> ParallelDrafter:
    """Build the drafter from a folder in any known layout. Raises InputError or CheckpointError."""
    folder = open_head(context, PEAGLE)
    config = folder.config
    check_fits(config, context)
    aux_layers = config.aux_layers(context.target.config.num_layers)
    log_head(folder, aux_layers)
    weights = HeadWeights(folder, context)
    mask_F = _mask(weights, config)
    head = load_head(weights, config, weights.rotary(config))
    if config.mask_token_id >= len(head.embedding):
        raise CheckpointError(
            f"{folder.folder}: config.json mask token",
            f"expected a token id below {len(head.embedding)}, the size of the embedding, found"
            f" {config.mask_token_id}",
            "use a head that was trained for this model",
        )
    return ParallelDrafter(head, aux_layers, head.fused(mask_F[None].chunk(config.num_aux, -1))[0])


def _mask(weights: HeadWeights, config: EagleConfig) -> torch.Tensor:
    """Return the states [F] for mask rows, used instead of the target's; zeros if missing."""
    size = names.fc_inputs(config)
    if not weights.has(names.MASK_HIDDEN):
        context = weights.context
        return torch.zeros(size, dtype=context.dtype, device=context.device)
    mask_F = weights.tensor(names.MASK_HIDDEN).flatten()
    if len(mask_F) != size:
        raise CheckpointError(
            f"{weights.folder.folder}: {names.MASK_HIDDEN}",
            f"expected {size} numbers, found {len(mask_F)}",
            "use a head that was trained for this model",
        )
    return mask_F
