"""DFlash and DSpark heads (arXiv 2602.06036, 2607.05147): a block of drafts in one pass.

The context is the target's auxiliary hidden states. They are projected once to the keys and values
of all layers. A block consists of the newest token and mask tokens. Its rows attend to the context
and to each other.

Suffixes of tensor names:

    T: rows of the step
    C: hidden size
    D: requests that draft
    B: rows of a block
    K: drafts
    V: vocabulary
    U: draft vocabulary
"""

import logging

import torch
from torch.nn import functional

from formats.errors import CheckpointError, InputError
from formats.heads import tensors as names
from formats.heads.block_config import BlockConfig
from qkernels import ops
from qkernels.attention.cache import PagedKv
from qkernels.attention.config import DECODE_MAX_ROWS
from qkernels.operands.split_k import split_heads
from qserve.engine.step.device_step import Batch
from qserve.model.blocks.attention import Attention
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.linear import Linear
from qserve.model.blocks.norm import Norm
from qserve.model.blocks.rotary import Rotary
from qserve.speculation.draft_step import DraftStep
from qserve.speculation.drafter import BuildContext
from qserve.speculation.heads.draft_vocabulary import DraftOutput
from qserve.speculation.heads.loading import HeadWeights, check_fits, open_head
from qserve.speculation.heads.markov import MarkovHead, load_markov

logger = logging.getLogger(__name__)


class BlockHead(torch.nn.Module):
    """Projects the target's states to keys and values, and computes the rows of a block."""

    def __init__(
        self,
        config: BlockConfig,
        *,
        embedding_VC: torch.Tensor,
        mask_C: torch.Tensor,  # embedding of a mask token
        fc: Linear,
        hidden_norm: Norm,
        context_kv: Linear,  # keys and values of all layers
        layers: list[Layer],
        norm: Norm,
        output: DraftOutput,
        markov: MarkovHead | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.fc, self.hidden_norm, self.context_kv = fc, hidden_norm, context_kv
        self.layers = torch.nn.ModuleList(layers)
        self.norm, self.output, self.markov = norm, output, markov
        self.register_buffer("embedding", embedding_VC)
        self.register_buffer("mask", mask_C)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Attention of the layers, in order."""
        return tuple(layer.attention for layer in self.layers)

    def write_context_(
        self, aux_states: tuple[torch.Tensor, ...], batch: Batch, caches: list[PagedKv]
    ) -> None:
        """Write the keys and values of the step's rows into the caches of all layers."""
        fused_TC = self.fc(torch.cat(aux_states, -1))
        plan = self.context_kv.plan(len(fused_TC))
        normed_TC, _ = self.hidden_norm(fused_TC, None, plan.input)
        heads = (self.config.num_kv_heads,) * (2 * len(self.layers))
        parts = split_heads(self.context_kv(normed_TC, plan), heads, self.config.head_dim)
        pairs = zip(parts[::2], parts[1::2], strict=True)
        for attention, (k, v), cache in zip(self.attentions, pairs, caches, strict=True):
            # The operation needs queries, too, so pass the keys: only blocks have queries, later.
            ops.rope_write_kv_(
                k,
                k,
                v,
                attention.rotary.cos_sin,
                batch.positions_T,
                cache,
                batch.slots_T,
                q_norm_D=attention.k_norm,
                k_norm_D=attention.k_norm,
                eps=attention.eps,
                interleaved=attention.rotary.interleaved,
            )

    def forward(self, step: DraftStep, num_rows: int) -> torch.Tensor:
        """Return the input of the output matrix for each row of a block, [B, D, C]."""
        tokens_D = step.tokens_D
        first_1DC = functional.embedding(tokens_D, self.embedding)[None]
        rest = self.mask.expand(num_rows - 1, len(tokens_D), -1)
        x_BDC = torch.cat([first_1DC, rest]) * self.config.embedding_factor
        tokens_BD = tokens_D.expand(num_rows, -1)
        fold = folded_rows(num_rows, self.config.num_heads // self.config.num_kv_heads)
        steps = {
            is_causal: step.block(tokens_BD, is_causal=is_causal, fold=1 if is_causal else fold)
            for is_causal in {each.is_causal for each in self.config.attentions}
        }
        x, residual = x_BDC.flatten(0, 1), None
        for layer, seen, cache in zip(
            self.layers, self.config.attentions, step.caches, strict=True
        ):
            x, residual = layer(x, residual, steps[seen.is_causal], cache)
        read, _ = self.norm(x, residual, None)
        return read.view(x_BDC.shape)

    def draft(self, step: DraftStep) -> torch.Tensor:
        """Return the drafts, int64 [D, K]."""
        first = 0 if self.config.samples_anchor else 1
        read_KDC = self(step, first + step.num_drafts)[first:]
        K, D, _ = read_KDC.shape
        logits = self.output(read_KDC.flatten(0, 1)).view(K, D, -1)
        if self.markov is None:
            return step.draw_all(self.output.spread(logits.flatten(0, 1)).view(K, D, -1))
        tokens_D, state, drafts = step.tokens_D, self.markov.start(D), []
        for index in range(K):
            bias_DU, state = self.markov(tokens_D, read_KDC[index], state)
            tokens_D = step.draw(self.output.spread(logits[index] + bias_DU), index)
            drafts.append(tokens_D)
        return torch.stack(drafts, 1)


def folded_rows(num_rows: int, group: int) -> int:
    """Return how many rows of a block attention can compute as one decode row with more heads."""
    fits = [n for n in range(1, num_rows + 1) if num_rows % n == 0 and n * group <= DECODE_MAX_ROWS]
    return max(fits, default=1)


class BlockDrafter:
    """Drafts a block. See DeviceDrafter."""

    # A key depends only on the target's states at its own position.
    looks_ahead = reads_images = False
    first_kv_heads = None

    def __init__(self, head: BlockHead, aux_layers: tuple[int, ...]) -> None:
        """`aux_layers`: target layers whose states the head reads, see DeviceDrafter."""
        self.head, self.aux_layers, self.attentions = head, aux_layers, head.attentions
        self.extra_positions = 0 if head.config.samples_anchor else 1

    def propose(self, step: DraftStep) -> torch.Tensor:
        self.head.write_context_(step.aux_states, step.batch, step.caches)
        if not len(step.last_rows_D) or not step.num_drafts:  # kernels require at least one row
            return step.last_rows_D.new_zeros(len(step.last_rows_D), step.num_drafts)
        return self.head.draft(step)


def build(context: BuildContext) -> BlockDrafter:
    """Build the drafter from a folder in any known layout. Raises InputError or CheckpointError."""
    folder = open_head(context, context.config.method)
    config = folder.config
    check_fits(config, context)
    wanted = context.config.most_tokens
    if wanted > config.max_drafts:
        raise InputError(
            "--speculative-config num_speculative_tokens",
            f"expected at most {config.max_drafts}, since the head has blocks of"
            f" {config.block_size} rows, found {wanted}",
            "lower it, or leave it out",
        )
    aux_layers = config.aux_layers(context.target.config.num_layers)
    logger.info(
        "%s head %s: %s layout, blocks of %d, states before layers %s (config.json states %s)",
        config.kind,
        folder.folder,
        config.layout,
        config.block_size,
        ", ".join(map(str, aux_layers)),
        list(config.explicit_aux_layers),
    )
    weights = HeadWeights(folder, context)
    return BlockDrafter(load_head(weights, config, weights.rotary(config)), aux_layers)


def load_head(weights: HeadWeights, config: BlockConfig, rotary: Rotary) -> BlockHead:
    """Load the head. It uses the target's embedding and output matrix if it has none."""
    eps = config.norm_eps

    def norm(name: str) -> Norm:
        return Norm(weights.tensor(f"{name}.weight"), eps)

    embedding_VC = weights.embedding()
    head = BlockHead(
        config,
        embedding_VC=embedding_VC,
        mask_C=_mask(weights, config, embedding_VC),
        fc=weights.linear("fc"),
        hidden_norm=norm("hidden_norm"),
        context_kv=weights.linear(
            *(
                f"layers.{number}.self_attn.{each}_proj"
                for number in range(config.num_layers)
                for each in "kv"
            )
        ),
        layers=[
            Layer(
                attention_norm=norm(f"layers.{number}.input_layernorm"),
                attention=weights.attention(config, number, rotary, _window(weights, number)),
                mlp_norm=norm(f"layers.{number}.post_attention_layernorm"),
                mlp=weights.mlp(number),
            )
            for number in range(config.num_layers)
        ],
        norm=norm("norm"),
        output=DraftOutput.load(
            weights, config, factor=config.logits_factor, cap=config.logits_cap
        ),
        markov=load_markov(weights, config),
    )
    for leaf in ("weight", "bias"):  # unused: speculation/depth.py chooses the number of drafts
        weights.skip(f"{names.CONFIDENCE}.{leaf}")
    weights.audit()
    return head


def _window(weights: HeadWeights, layer: int) -> int | None:
    """Return the attention window of a layer; None: no window.

    Without causality, the window is counted from the end of the block. If all layers of the target
    have windows, older pages are freed, so the window is at most the target's longest.
    """
    config: BlockConfig = weights.folder.config
    seen, kept = config.attentions[layer], weights.context.target.config.longest_window
    window = seen.window
    if window is not None and not seen.is_causal:
        window += config.block_size
    found = [each for each in (window, kept) if each is not None]
    return min(found, default=None)


def _mask(weights: HeadWeights, config: BlockConfig, embedding_VC: torch.Tensor) -> torch.Tensor:
    """Return the embedding of the mask token, [C]."""
    if weights.has(names.MASK_EMBEDDING) and config.kind == "dflash":
        return weights.tensor(names.MASK_EMBEDDING).view(-1)
    weights.skip(names.MASK_EMBEDDING)  # DSpark files may have an unused one
    if config.mask_token_id >= len(embedding_VC):
        raise CheckpointError(
            f"{weights.folder.folder}: config.json mask_token_id",
            f"expected a token id below {len(embedding_VC)}, the size of the embedding, found"
            f" {config.mask_token_id}",
            "use a head that was trained for this model",
        )
    return embedding_VC[config.mask_token_id].clone()
