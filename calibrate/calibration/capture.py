"""Run a float model one decoder layer at a time, with transformers' layer classes.

A layer is built from its class and config.json without memory (meta device), gets its tensors, runs
over the hidden states of all windows, and is dropped. Positions and masks are passed explicitly:
the full model is never built. Legend: W windows, S tokens of a window, D hidden size, V vocabulary.
"""

import importlib
import inspect
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from calibrate.calibration.adapter import put_beside
from calibrate.calibration.modules import Experts, ScaledMixture, with_linears
from calibrate.calibration.statistics import BatchSums, HeldOut, InputStatistics
from calibrate.calibration.vision import (
    Media,
    WindowMedia,
    axis_positions,
    mutual_mask,
    with_added,
)
from calibrate.devices import Turns
from calibrate.float_model import FloatModel
from calibrate.layer_map import LayerMap
from formats.architecture.flags import is_set
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, DiskError, InputError, one_line
from formats.numerics.alibi import alibi_slopes
from formats.table import size_text

Rounding = Callable[[torch.Tensor], torch.Tensor]  # applied to a linear's input

# Tokens per batch of windows: enough to fill a GPU, with little memory.
BATCH_TOKENS = 8192


class LayerRunner:
    """Builds and runs the decoder layers of one model."""

    def __init__(
        self,
        reader: FloatModel | CheckpointReader,
        layer_map: LayerMap,
        device: str,
        axis_rotary: nn.Module | None = None,
    ) -> None:
        """`axis_rotary`: rotations of positions with three axes, of models that take images.

        Raises CheckpointError if transformers does not know the model's config.
        """
        self._axis_rotary = None if axis_rotary is None else axis_rotary.to(device)
        self.layer_map, self.device, self.raw_config = layer_map, device, reader.config
        self._adapter = reader.adapter if isinstance(reader, FloatModel) else None
        raw = dict(reader.config)
        architecture = raw["architectures"][0]
        try:
            config = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
            model_class = getattr(transformers, architecture)
        except (KeyError, ValueError, AttributeError) as error:
            raise CheckpointError(
                str(reader.folder / "config.json"),
                f"transformers {transformers.__version__} cannot read it: {one_line(error)}",
                "calibration runs the float model's layers; use the recipe rtn, which does not",
            ) from None
        row = layer_map.family
        # Only the plain attention implementation has soft caps, sinks, ALiBi, GPT-J's rotation.
        capped = getattr(config, "attn_logit_softcapping", None) is not None
        self.eager = capped or bool(row.sinks or row.rotary_dim_key or row.alibi)
        config._attn_implementation = "eager" if self.eager else "sdpa"
        self.config = config
        module = importlib.import_module(model_class.__module__)
        family = architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        kinds = ("DecoderLayer", "TextDecoderLayer", "Layer", "Block")
        classes = [f"{family}{kind}" for kind in kinds]
        self._layer_class = next(getattr(module, name) for name in classes if hasattr(module, name))
        self._mamba_factors = getattr(module, "compute_mup_vector", None)
        self._rotary = None
        # Layers with rotary_dim_key have tables of their own.
        if row.rotates(vars(config)) and not row.rotary_dim_key:
            # That of a model which also sees pictures has a name of its own.
            rotary = getattr(module, f"{family}RotaryEmbedding", None)
            rotary = rotary or getattr(module, f"{family}TextRotaryEmbedding")
            self._rotary = rotary(config).to(device)
        # A CPU computes in float32; a GPU in the model's own 16 bits, with float32 statistics.
        stored = reader.entries[layer_map.embedding].dtype
        self.dtype = stored if torch.device(device).type == "cuda" else torch.float32
        self._positions: dict[tuple[int, str], Any] = {}
        # The embeddings of positions [S, D], of models that learn them.
        self.positions_SD: torch.Tensor | None = None
        if row.positions is not None:
            table = reader.get(row.positions.name)[row.positions.offset :]
            self.positions_SD = table.to(device, self.dtype)
        self._embedding_norm: nn.Module | None = None
        if row.embedding_norm:
            bias = reader.get(row.embedding_norm_bias) if row.norm_bias else None
            self._embedding_norm = self._norm(reader.get(row.embedding_norm), bias)
        self._last_norm_bias = reader.get(row.last_norm_bias) if row.norm_bias else None
        self._head_bias = reader.get(row.head_bias_name) if row.head_bias else None

    def build(
        self,
        layer: int,
        state: Mapping[str, torch.Tensor],
        activation: Rounding | Mapping[str, Rounding] | None = None,
        all_experts: bool = False,
    ) -> nn.Module:
        """Build the layer as a module with the tensors `state`, in the computing dtype.

        `activation` is applied to the input of every linear, such as fake_quantize_tokens, or only
        to the linears that it names. `all_experts`: every token passes through every expert, so
        that hooks see it there; the layer's output is that of the experts that the router chose.
        """
        with torch.device("meta"):
            module = with_linears(self._make_layer(layer))
            second: tuple[str, ...] = ()  # prefixes of names of modules that have two
            stored: dict[str, str] = {}  # the checkpoint's names of tensors that have others here
            if self.layer_map.has_own_linears(self.raw_config, layer):
                experts = self.layer_map.experts
                own = experts.module if hasattr(module, experts.module) else "mlp"
                mixture = module.get_submodule(own)
                mixture.experts = Experts(
                    self.layer_map, self.config, self.raw_config, all_tokens=all_experts
                )
                if experts.scaled_inputs:
                    mixture = ScaledMixture(mixture)
                    setattr(module, own, mixture)
                setattr(module, experts.module, mixture)
                # If a module has two names, the checkpoint's name counts.
                second = () if experts.module == own else (f"{own}.",)
                correction, _, inside = experts.routing.correction.partition(".")
                if inside and hasattr(mixture.gate, correction):  # ERNIE's, not in its gate
                    setattr(mixture, correction, mixture.gate.get_submodule(correction))
                    second = (*second, f"{own}.gate.{correction}.")
                elif correction and hasattr(getattr(mixture, "gate", None), correction):
                    stored[f"{own}.gate.{correction}"] = f"{experts.module}.{correction}"
                router = experts.router.rpartition(".")[0]
                if hasattr(module.get_submodule(router), "weight"):  # GraniteMoE's
                    stored[f"{router}.weight"] = f"{experts.router}.weight"
        built = {n: w for n, w in module.state_dict().items() if not n.startswith(second)}
        wanted = {name: stored.get(name, name) for name in built}
        missing = [name for name in wanted.values() if name not in state]
        if missing:
            raise CheckpointError(f"{self.layer_map.prefix(layer)}.{missing[0]}", "is missing")
        for name, own in wanted.items():
            if state[own].shape != built[name].shape:
                raise CheckpointError(
                    f"{self.layer_map.prefix(layer)}.{own}",
                    f"config.json states {list(built[name].shape)}, found {list(state[own].shape)}",
                    "fix config.json",
                )
        given = {name: state[own].to(self.device, self.dtype) for name, own in wanted.items()}
        module.load_state_dict(given, assign=True, strict=not second)
        if any(buffer.is_meta for buffer in module.buffers()):
            self._fill_buffers(module, layer)
        if self._adapter is not None:
            prefix = self.layer_map.prefix(layer)
            put_beside(module, prefix, self._adapter, self.dtype, self.device)
        if activation is not None:
            for group in self.layer_map.inputs(self.raw_config, layer):
                for name in group:
                    rounding = activation if callable(activation) else activation.get(name)
                    if rounding is not None:
                        module.get_submodule(name).register_forward_pre_hook(
                            lambda _, args, rounding=rounding: (rounding(args[0]),)
                        )
        return module.train(False).requires_grad_(False)

    def _fill_buffers(self, module: nn.Module, layer: int) -> None:
        """Fill in the tables that a layer computes as it is built, and that no file holds."""
        for name, buffer in self._make_layer(layer).named_buffers():
            parent, _, leaf = name.rpartition(".")
            if module.get_buffer(name).is_meta:
                setattr(module.get_submodule(parent), leaf, buffer.to(self.device))

    def _make_layer(self, layer: int) -> nn.Module:
        """Build an empty layer. Raises CheckpointError if transformers cannot."""
        try:
            made = self._layer_class(self.config, layer)
            if self._mamba_factors is not None:  # the model registers them, not the layer
                factors = self._mamba_factors(self.config)
                made.mamba.register_buffer("mup_vector", factors, persistent=False)
            return made
        # Exceptions that layers raise on values that no check of the config rejected.
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                "config.json",
                f"transformers cannot build a layer from it: {type(error).__name__} {error}",
            ) from None

    def run(
        self,
        module: nn.Module,
        layer: int,
        hidden_BSD: torch.Tensor,
        cache: Any = None,
        grad: bool = False,
        media: Media = (),
    ) -> torch.Tensor:
        """Run one layer on a batch of whole windows.

        `cache` observes keys and values (kv_range.py). `media`: images of each window; (): none.
        """
        length = hidden_BSD.shape[1]
        kind = self._kind(layer)
        if (length, kind) not in self._positions:
            ids_1S = torch.arange(length, device=self.device)[None]
            rotary = None
            if self._rotary is not None:
                # One rotary embedding per kind of layer (Gemma 3), or one for all.
                accepted = inspect.signature(self._rotary.forward).parameters
                extra = (kind,) if "layer_type" in accepted else ()
                rotary = self._rotary(hidden_BSD[:1], ids_1S, *extra)
            self._positions[length, kind] = (ids_1S, rotary, self._mask(length, kind))
        position_ids, rotary, mask = self._positions[length, kind]
        if any(each is not None for each in media):
            if self._axis_rotary is not None:
                rotary = self._axis_rotary(hidden_BSD, axis_positions(media, length, self.device))
            if any(each is not None and each.is_mutual for each in media):
                window = self.config.sliding_window if kind == "sliding_attention" else length
                mask = mutual_mask(media, length, window, self.device, self.dtype)
        accepted = inspect.signature(self._layer_class.forward).parameters
        cache_name = "layer_past" if "layer_past" in accepted else "past_key_values"
        others = {"alibi": None} if "alibi" in accepted else {}
        if self.layer_map.family.alibi:
            others, mask = self._biases(hidden_BSD, mask, "alibi" in accepted)
        with torch.set_grad_enabled(grad):
            output = module(
                hidden_BSD,
                attention_mask=mask,
                position_ids=position_ids,
                position_embeddings=rotary,
                use_cache=False,
                **{cache_name: cache},
                **others,
            )
        output = output[0] if isinstance(output, tuple) else output
        return with_added(output, layer, media)

    def _biases(
        self, hidden_BSD: torch.Tensor, mask: torch.Tensor, by_name: bool
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """ALiBi's biases as BLOOM's and Falcon's layers take them, by name, or as MPT's do.

        The mask is as they take it.
        """
        heads = self.raw_config["num_attention_heads"]
        slopes = torch.tensor(alibi_slopes(heads), device=self.device)
        ids_S = torch.arange(hidden_BSD.shape[1], device=self.device)
        biases_H1S = slopes[:, None, None] * ids_S
        if by_name:
            return {"alibi": biases_H1S.repeat(len(hidden_BSD), 1, 1).to(self.dtype)}, mask
        return {"position_bias": biases_H1S}, mask != 0

    def final_logits(
        self,
        hidden_SD: torch.Tensor,
        norm_D: torch.Tensor,
        head_VD: torch.Tensor,
        grad: bool = False,
    ) -> torch.Tensor:
        """Last norm and head, with the divisor, factor and soft cap of models that have them."""
        family, norm = self.layer_map.family, self._norm(norm_D, self._last_norm_bias)
        with torch.set_grad_enabled(grad):
            logits_SV = norm(hidden_SD) @ head_VD.to(self.device, self.dtype).t()
            if self._head_bias is not None:
                logits_SV = logits_SV + self._head_bias.to(self.device, self.dtype)
        divisor = getattr(self.config, family.logits_divisor_key or "-", None)
        factor = getattr(self.config, family.logits_factor_key or "-", None)
        cap = getattr(self.config, family.logits_cap_key or "-", None)
        logits_SV = logits_SV if divisor is None else logits_SV / divisor
        logits_SV = logits_SV if factor is None else logits_SV * factor
        return logits_SV if cap is None else torch.tanh(logits_SV / cap) * cap

    def _norm(self, weight_D: torch.Tensor, bias_D: torch.Tensor | None) -> nn.Module:
        """Return a norm like the first of a layer."""
        norms = self.layer_map.family.norms
        with torch.device("meta"):
            name = next(n.name for n in norms if is_set(n.present, self.raw_config))
            norm = self._make_layer(0).get_submodule(name)
        state = {"weight": weight_D, "bias": bias_D}
        given = {n: t.to(self.device, self.dtype) for n, t in state.items() if t is not None}
        norm.load_state_dict(given, assign=True)
        return norm.requires_grad_(False)

    def normed_embeddings(self, rows_SD: torch.Tensor) -> torch.Tensor:
        """Apply the norm of embeddings, in models that have one."""
        if self._embedding_norm is None:
            return rows_SD
        return self._embedding_norm(rows_SD.to(self.device)).to(rows_SD.device)

    def has_state(self, layer: int) -> bool:
        """True if a layer has a recurrent state instead of keys and values."""
        return self.layer_map.has_state(self.raw_config, layer)

    def _kind(self, layer: int) -> str:
        kinds = getattr(self.config, "layer_types", None)
        if kinds:
            return kinds[layer]
        sliding = getattr(self.config, "sliding_window", None)
        return "sliding_attention" if sliding else "full_attention"

    def _mask(self, length: int, kind: str) -> torch.Tensor | None:
        """Attention mask.

        None: causal, left to the attention kernel; else additive [1, 1, S, S].
        """
        window = self.config.sliding_window if kind == "sliding_attention" else None
        chunk = self.config.attention_chunk_size if kind == "chunked_attention" else None
        if not self.eager and (window or chunk or length) >= length:
            return None
        ids_S = torch.arange(length, device=self.device)
        distance_SS = ids_S[:, None] - ids_S
        seen_SS = (distance_SS >= 0) & (distance_SS < (window or length))
        if chunk is not None:
            seen_SS &= ids_S[:, None] // chunk == ids_S // chunk
        mask_SS = torch.zeros(length, length, dtype=self.dtype, device=self.device)
        return mask_SS.masked_fill_(~seen_SS, torch.finfo(self.dtype).min)[None, None]


def batch_windows(length: int) -> int:
    """Number of windows of this length in one batch."""
    return max(1, BATCH_TOKENS // length)


class HiddenStates:
    """Hidden states of all windows between two layers, [W, S, D], in memory or in a file."""

    def __init__(
        self,
        ids_WS: torch.Tensor,
        embedding_VD: torch.Tensor,
        runner: LayerRunner,
        spill: Path | None = None,
        before_batch: Callable[[], None] = lambda: None,
        media: Sequence[WindowMedia | None] = (),
    ) -> None:
        """Embed the windows. `spill`: folder for the states, to save memory.

        `media`: images of each window; (): there are none.
        """
        self.media = media
        if int(ids_WS.max()) >= embedding_VD.shape[0]:
            raise InputError(
                "calibration data",
                f"has the token {int(ids_WS.max())}, but the model's vocabulary is"
                f" {embedding_VD.shape[0]}",
                "use the model's own tokenizer",
            )
        positions_SD, length = runner.positions_SD, ids_WS.shape[1]
        if positions_SD is not None:
            if length > positions_SD.shape[0]:
                raise InputError(
                    "calibration data",
                    f"has windows of {length} tokens, but the model has {positions_SD.shape[0]}"
                    " positions",
                    "give a shorter --sequence-length",
                )
            positions_SD = positions_SD[:length]
        shape = (*ids_WS.shape, embedding_VD.shape[1])
        if spill is None:
            self.states_WSD = torch.empty(shape, dtype=runner.dtype, device=runner.device)
        else:
            self.states_WSD = _in_file(spill, shape, runner.dtype)
        scale = runner.layer_map.family.embedding_factor(runner.config.to_dict())
        for number, ids_S in enumerate(ids_WS):
            rows_SD = embedding_VD[ids_S.to(embedding_VD.device)].to(runner.dtype)
            rows_SD = rows_SD * torch.tensor(scale, dtype=runner.dtype)
            if positions_SD is not None:
                rows_SD = rows_SD + positions_SD.to(rows_SD.device)
            if media and (found := media[number]) is not None:
                rows_SD[found.is_image_S] = found.rows_RD.to(rows_SD)
            self.states_WSD[number] = runner.normed_embeddings(rows_SD)
        self.batch, self.before_batch = batch_windows(ids_WS.shape[1]), before_batch

    def batches(self) -> Iterator[tuple[torch.Tensor, Media]]:
        """Views of whole windows, [B, S, D], and their images."""
        for number, batch_BSD in enumerate(self.states_WSD.split(self.batch)):
            self.before_batch()
            first = number * self.batch
            yield batch_BSD, self.media[first : first + self.batch]

    def advance(
        self, runner: LayerRunner, module: nn.Module, layer: int, cache: Any = None
    ) -> None:
        """Replace the states by the layer's outputs. Raises InputError if one is not finite."""
        for batch_BSD, media in self.batches():
            output_BSD = runner.run(module, layer, batch_BSD.to(runner.device), cache, media=media)
            if not torch.isfinite(output_BSD).all():
                raise InputError(
                    runner.layer_map.prefix(layer),
                    "the layer's outputs contain NaN or infinity",
                    "check that the float model works, or use `device` cpu, which computes "
                    "in float32",
                )
            batch_BSD.copy_(output_BSD)


def _in_file(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Tensor in an unlinked file, which disappears with the process. Raises DiskError."""
    size = math.prod(shape)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            # Allocate all blocks now: a later write to the mapping without disk space would be
            # fatal.
            os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
    except OSError as error:
        raise DiskError(
            f"`spill` {folder}",
            f"cannot hold {size_text(size * dtype.itemsize)} of hidden states: {error.strerror}",
            "choose a folder on a disk with more space",
        ) from None


def empty_statistics(
    runner: LayerRunner, layer: int, state: Mapping[str, torch.Tensor], all_experts: bool = False
) -> dict[str, InputStatistics]:
    """Empty statistics of each linear's input by local name, on the runner's device.

    Linears that share an input share the object; with `all_experts`, so do all experts that read
    the layer's input.
    """
    statistics: dict[str, InputStatistics] = {}
    of_experts: InputStatistics | None = None
    for group in runner.layer_map.inputs(runner.raw_config, layer):
        name = f"{runner.layer_map.prefix(layer)}.{group[0]}"
        width = state[f"{group[0]}.weight"].shape[1]
        if all_experts and runner.layer_map.reads_experts_input(group[0]):
            of_experts = of_experts or InputStatistics(width, runner.device, name)
            stats = of_experts
        else:
            is_routed = runner.layer_map.expert_kind(group[0]) is not None and not all_experts
            stats = InputStatistics(width, runner.device, name, is_routed=is_routed)
        statistics.update(dict.fromkeys(group, stats))
    return statistics


def collect_statistics(
    runner: LayerRunner,
    module: nn.Module,
    layer: int,
    hidden: HiddenStates,
    reference: HiddenStates | None = None,
) -> dict[str, InputStatistics]:
    """Run the layer over all windows. Returns each linear's input statistics by local name.

    `reference` holds the same windows in the float model. Raises InputError on a NaN, naming the
    linear.
    """
    statistics = empty_statistics(runner, layer, module.state_dict())
    add_statistics(statistics, runner, module, layer, hidden, reference)
    for stats in dict.fromkeys(statistics.values()):
        stats.check()
    return statistics


def add_statistics(
    statistics: Mapping[str, InputStatistics],
    runner: LayerRunner,
    module: nn.Module,
    layer: int,
    hidden: HiddenStates,
    reference: HiddenStates | None = None,
    numbers: Iterable[int] | None = None,
    turns: Turns | None = None,
    held_every: int = 0,
) -> None:
    """Run the layer over windows and add its linears' inputs to `statistics`.

    If other devices add to them at the same time, `numbers` are the indices of the batches in all
    of the data. `turns` makes each device wait for the batch before, so that sums equal those of
    one device. The last of `held_every` windows is held out; 0: none is.
    """
    inputs: dict[InputStatistics, torch.Tensor] = {}
    hooks, shared = [], []
    for name, stats in statistics.items():
        if stats not in shared:  # count a shared input once
            shared.append(stats)
            hooks.append(
                module.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, stats=stats: inputs.__setitem__(stats, args[0])
                )
            )

    def run(
        batch_BSD: torch.Tensor, media: Media, chosen_B: torch.Tensor
    ) -> dict[InputStatistics, torch.Tensor]:
        """Inputs by statistics. A batch may have no token for an expert."""
        inputs.clear()
        if chosen_B.any():
            kept = batch_BSD if chosen_B.all() else batch_BSD[chosen_B]
            images = [each for each, is_kept in zip(media, chosen_B, strict=False) if is_kept]
            runner.run(module, layer, kept.to(runner.device), media=images)
        return dict(inputs)

    def run_reference(
        batch_BSD: torch.Tensor | None, media: Media, chosen_B: torch.Tensor
    ) -> dict[InputStatistics, torch.Tensor]:
        """The float model's inputs, of linears that read the same tokens in both models."""
        found = {} if batch_BSD is None else run(batch_BSD, media, chosen_B)
        return {stats: x for stats, x in found.items() if not stats.is_routed}

    references = iter(reference.batches()) if reference is not None else None
    numbers = itertools.count() if numbers is None else numbers
    for (batch_BSD, media), number in zip(hidden.batches(), numbers, strict=False):
        held_B = held_out_windows(len(batch_BSD), number * hidden.batch, held_every)
        reference_BSD = None if references is None else next(references)[0]
        expected = run_reference(reference_BSD, media, ~held_B)
        found = run(batch_BSD, media, ~held_B)
        sums = {s: BatchSums.of(x, expected.get(s)) for s, x in found.items() if x.numel()}
        held: dict[InputStatistics, HeldOut] = {}
        if held_B.any():
            expected = run_reference(reference_BSD, media, held_B)
            apart = run(batch_BSD, media, held_B)
            held = {s: HeldOut.of(x, expected.get(s)) for s, x in apart.items()}
        for stats in shared:
            # The turn of an expert without a token passes all the same.
            with nullcontext() if turns is None else turns.of(stats, number):
                if stats in sums:
                    stats.add(sums[stats])
                if stats in held:
                    stats.hold_out(held[stats])
    inputs.clear()
    for hook in hooks:
        hook.remove()


def held_out_windows(count: int, first: int, every: int) -> torch.Tensor:
    """True for windows that are held out, [B]; `first` is the index of the first in the data."""
    if not every:
        return torch.zeros(count, dtype=torch.bool)
    return (torch.arange(count) + first) % every == every - 1
