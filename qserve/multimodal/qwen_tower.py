"""QwenTower: the vision towers of Qwen2-VL to Qwen3.5, computed with the project's operations.

Weights and arithmetic are those of transformers' module. For each layer transformers launches 45
kernels and waits for the device, and it attends to one image or window after the other. Here a
layer has nine kernels, and images of the same size are computed together.

Suffixes of tensor names:

    B: images of the same size
    N: patches of an image
    P: values of a patch
    T: B * N, patches of all these images
    C: hidden size of the tower
    H: heads
    D: head size
    M: embeddings of an image
    W: values of an embedding
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from formats.errors import InputError
from qkernels import ops
from qkernels.operands.forms import InputForm, LinearInput
from qserve.multimodal.rounded_linear import RoundedLinear

ACTIVATIONS = {
    **{"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "gelu": "gelu"},
    "quick_gelu": "",  # Qwen2-VL: computed with torch
}
QUICK = 1.702  # factor of quick_gelu
NUM_PLANS = 32  # number of image sizes whose tables are kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GridPlan:
    """Tables for images of one size, on the device."""

    cos_sin_ND: torch.Tensor  # float32 cosines, followed by the sines
    # the four learned positions between which a patch interpolates, and their weights; None: the
    # tower has no learned positions
    corners_4N: torch.Tensor | None
    weights_4N: torch.Tensor | None
    # order of the patches by windows, and the order that undoes it for embeddings; None: patches
    # stay as they come
    order_N: torch.Tensor | None
    back_M: torch.Tensor | None
    # (number of windows, length), for each run of windows of one length
    windows: tuple[tuple[int, int], ...]


class QwenTower:
    """Turns the patches of images into embeddings."""

    def __init__(self, visual: Any) -> None:
        """Read the options of transformers' module `visual`, whose weights this tower uses.

        Raises InputError.
        """
        self._visual, config = visual, visual.config
        if config.hidden_act not in ACTIVATIONS:
            raise InputError(
                "config.json vision_config.hidden_act",
                f"expected {', '.join(ACTIVATIONS)}, found {config.hidden_act!r}",
                "serve the text alone: --language-model-only",
            )
        self._merge = config.spatial_merge_size
        self._num_heads = config.num_heads
        self._activation = ACTIVATIONS[config.hidden_act]
        # indices of the layers that attend to the whole image; None: all layers do
        self._whole = getattr(config, "fullatt_block_indexes", None)
        self._window = getattr(config, "window_size", 0) // config.patch_size // self._merge
        self._levels = tuple(getattr(config, "deepstack_visual_indexes", None) or ())
        # (rows, columns) of patches -> tables for images of this size
        self.plan = lru_cache(NUM_PLANS)(self._plan)
        self._norms = {
            module: _norm_spec(module)
            for module in visual.modules()
            if type(module).__name__.endswith("Norm")
        }

    @property
    def square(self) -> int:
        """Number of patches that are merged into one embedding."""
        return self._merge**2

    @property
    def in_features(self) -> int:
        """Values of a patch: P."""
        return self._visual.patch_embed.proj.weight[0].numel()

    @property
    def out_features(self) -> int:
        """Number of values of an embedding, including those of all levels: W."""
        config = self._visual.config
        width = getattr(config, "out_hidden_size", config.hidden_size)
        return width * (1 + len(self._levels))

    @property
    def dtype(self) -> torch.dtype:
        return self._visual.patch_embed.proj.weight.dtype

    def encode(self, patches_BNP: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Return the embeddings [B, M, W] of images, with the values of all levels side by side.

        `rows` and `columns` count patches. Patches that are merged must be next to each other.
        """
        visual, plan = self._visual, self.plan(rows, columns)
        batch, count, _ = patches_BNP.shape
        projection = visual.patch_embed.proj
        weight_CP = projection.weight.flatten(1)
        x_BNC = F.linear(patches_BNP.to(weight_CP.dtype), weight_CP, projection.bias)
        if plan.corners_4N is not None:
            corners_4NC = visual.pos_embed(plan.corners_4N)
            places_NC = (corners_4NC * plan.weights_4N[..., None]).sum(0)
            x_BNC = x_BNC + places_NC.to(x_BNC.dtype)
        if plan.order_N is not None:
            x_BNC = x_BNC[:, plan.order_N]
        x_TC = x_BNC.flatten(0, 1)
        places_T = torch.arange(count, device=x_TC.device).repeat(batch)
        branch_TC: torch.Tensor | None = None
        found: list[torch.Tensor] = []
        for number, block in enumerate(visual.blocks):
            normed, x_TC = self._add(x_TC, branch_TC, block.norm1, block.attn.qkv)
            if number - 1 in self._levels:
                found.append(self._merged(x_TC, self._level(number - 1)))
            is_whole = self._whole is None or number in self._whole
            windows = ((1, count),) if is_whole else plan.windows
            branch_TC = self._attend(normed, block.attn, plan, places_T, batch, windows)
            normed, x_TC = self._add(x_TC, branch_TC, block.norm2, _inner(block.mlp))
            branch_TC = self._feed_forward(normed, block.mlp, len(x_TC))
        assert branch_TC is not None
        _, x_TC = ops.norm(branch_TC, x_TC, None)
        if len(visual.blocks) - 1 in self._levels:
            found.append(self._merged(x_TC, self._level(len(visual.blocks) - 1)))
        rows_BMW = torch.cat([self._merged(x_TC, visual.merger), *found], -1).unflatten(
            0, (batch, -1)
        )
        return rows_BMW if plan.back_M is None else rows_BMW[:, plan.back_M]

    def _add(
        self, x_TC: torch.Tensor, branch_TC: torch.Tensor | None, norm: Any, reader: Any
    ) -> tuple[LinearInput, torch.Tensor]:
        """Add a layer's output to the stream. Return the normalized sum and the sum.

        The first one is in the form that the linear `reader` takes.
        """
        form, spec = _form(reader, len(x_TC)), self._norms[norm]
        if branch_TC is None:
            return ops.norm(x_TC, None, spec, form)
        return ops.norm(branch_TC, x_TC, spec, form)

    def _attend(
        self,
        x: LinearInput,
        attention: Any,
        plan: GridPlan,
        places_T: torch.Tensor,
        batch: int,
        windows: tuple[tuple[int, int], ...],
    ) -> torch.Tensor:
        qkv_T3HD = attention.qkv(x).unflatten(-1, (3, self._num_heads, -1))
        q_THD, k_THD, v_THD = qkv_T3HD.unbind(1)
        q_THD, k_THD = ops.apply_rope(q_THD, k_THD, plan.cos_sin_ND, places_T)
        heads = [each.unflatten(0, (batch, -1)) for each in (q_THD, k_THD, v_THD)]
        found, first = [], 0
        for number, length in windows:
            end = first + number * length
            of_windows = (
                each[:, first:end].unflatten(1, (number, length)).flatten(0, 1).transpose(1, 2)
                for each in heads
            )
            seen = F.scaled_dot_product_attention(*of_windows)
            found.append(seen.transpose(1, 2).reshape(batch, number * length, -1))
            first = end
        seen_BNC = found[0] if len(found) == 1 else torch.cat(found, 1)
        return attention.proj(seen_BNC.flatten(0, 1))

    def _feed_forward(self, x: LinearInput, mlp: Any, rows: int) -> torch.Tensor:
        inner = _inner(mlp)(x)
        if not self._activation:
            return mlp.fc2(inner * torch.sigmoid(QUICK * inner))
        if hasattr(mlp, "linear_fc1"):
            spec, last = ops.ActSpec(kind=self._activation, gated=False), mlp.linear_fc2
        else:
            spec, last = ops.ActSpec(kind=self._activation), mlp.down_proj
            inner = torch.cat([inner, mlp.up_proj(x)], -1)
        return last(ops.activate(inner, spec, _form(last, rows)))

    def _level(self, block: int) -> Any:
        """Return the merger after a block, whose output one of the text model's layers adds."""
        return self._visual.deepstack_merger_list[self._levels.index(block)]

    def _merged(self, x_TC: torch.Tensor, merger: Any) -> torch.Tensor:
        """Merge each square of patches into one embedding."""
        square = self.square
        if hasattr(merger, "ln_q"):
            normed = ops.norm(x_TC, None, self._norms[merger.ln_q])[0].unflatten(0, (-1, square))
            first, _, last = merger.mlp
            return last(F.gelu(first(normed.flatten(1))))
        x = x_TC.unflatten(0, (-1, square)).flatten(1) if merger.use_postshuffle_norm else x_TC
        normed = ops.norm(x, None, self._norms[merger.norm])[0].reshape(len(x_TC) // square, -1)
        return merger.linear_fc2(F.gelu(merger.linear_fc1(normed)))

    def _plan(self, rows: int, columns: int) -> GridPlan:
        visual, merge = self._visual, self._merge
        device = visual.patch_embed.proj.weight.device
        places_N2 = _in_blocks(
            torch.cartesian_prod(torch.arange(rows), torch.arange(columns)), rows, columns, merge
        )
        frequencies_F = visual.rotary_pos_emb.inv_freq.float().cpu()
        angles_NF = (places_N2[..., None].float() * frequencies_F).flatten(1)
        corners_4N = weights_4N = None
        if hasattr(visual, "pos_embed"):
            side = round(visual.pos_embed.num_embeddings**0.5)
            corners_4N, weights_4N = _corners(rows, columns, side)
            corners_4N = _in_blocks(corners_4N.T, rows, columns, merge).T.to(device)
            weights_4N = _in_blocks(weights_4N.T, rows, columns, merge).T.to(device)
        order_N, back_M, windows = None, None, ((1, rows * columns),)
        if self._whole is not None:
            order_M, windows = _windows(rows // merge, columns // merge, self._window)
            square = self.square
            order_N = (order_M[:, None] * square + torch.arange(square)).flatten()
            angles_NF = angles_NF[order_N]
            windows = tuple((number, length * square) for number, length in windows)
            order_N, back_M = order_N.to(device), order_M.argsort().to(device)
        return GridPlan(
            cos_sin_ND=torch.cat([angles_NF.cos(), angles_NF.sin()], -1).to(device),
            corners_4N=corners_4N,
            weights_4N=weights_4N,
            order_N=order_N,
            back_M=back_M,
            windows=windows,
        )


def _inner(mlp: Any) -> Any:
    """Return the first linear of a feed-forward, or its gate."""
    names = ("linear_fc1", "fc1", "gate_proj")
    return next(getattr(mlp, name) for name in names if hasattr(mlp, name))


def _form(linear: Any, rows: int) -> InputForm:
    return linear.form(rows) if isinstance(linear, RoundedLinear) else None


def _norm_spec(module: Any) -> ops.NormSpec:
    bias_C = getattr(module, "bias", None)
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    kind = "rms" if "RMS" in type(module).__name__ else "layer"
    return ops.NormSpec(kind=kind, weight_C=module.weight, bias_C=bias_C, eps=eps)


def _in_blocks(values_NX: torch.Tensor, rows: int, columns: int, merge: int) -> torch.Tensor:
    """Reorder patches from row by row to block by block; the patches of a block are merged."""
    sizes = rows // merge, merge, columns // merge, merge
    return values_NX.unflatten(0, sizes).transpose(1, 2).flatten(0, 3)


def _corners(rows: int, columns: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the four learned positions around each patch, and their weights, both [4, N]."""
    down, right = (torch.linspace(0, side - 1, count) for count in (rows, columns))
    floors, parts, ends = [], [], []
    for places in (down, right):
        floor = places.int()
        floors.append(floor)
        ends.append((floor + 1).clamp(max=side - 1))
        parts.append(places - floor)
    (top, left), (low, far) = floors, ends
    y, x = parts[0][:, None], parts[1]
    numbers = [a[:, None] * side + b for a in (top, low) for b in (left, far)]
    weights = [(1 - y) * (1 - x), (1 - y) * x, y * (1 - x), y * x]
    return torch.stack(numbers).flatten(1).long(), torch.stack(weights).flatten(1)


def _windows(
    rows: int, columns: int, size: int
) -> tuple[torch.Tensor, tuple[tuple[int, int], ...]]:
    """Return the order of embeddings by windows, and the number of windows of each length.

    Windows at the right and lower edges are smaller. Windows of one length are next to each other.
    """
    numbers = torch.arange(rows * columns).view(rows, columns)
    by_length: dict[int, list[torch.Tensor]] = {}
    for row in range(0, rows, size):
        for column in range(0, columns, size):
            window = numbers[row : row + size, column : column + size].flatten()
            by_length.setdefault(len(window), []).append(window)
    order_M = torch.cat([window for windows in by_length.values() for window in windows])
    return order_M, tuple((len(windows), length) for length, windows in by_length.items())
