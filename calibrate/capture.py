"""Run a float model one decoder layer at a time. Knows transformers' layer classes, no solver.

A layer is built from its class and config.json without memory (meta device), given its tensors,
run over the hidden states of all windows, and let go. Positions and masks are passed explicitly: no
full model is ever built. Legend: W windows, S tokens of a window, D hidden size, V vocabulary.
"""

import importlib
import inspect
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.activations import ACT2FN

from calibrate.adapter import put_beside
from calibrate.devices import Turns
from calibrate.float_model import FloatModel
from calibrate.layer_map import LayerMap
from calibrate.statistics import BatchSums, InputStatistics
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, DiskError, InputError, one_line
from formats.table import size_text

Rounding = Callable[[torch.Tensor], torch.Tensor]  # of a linear's input

# Windows are run in batches of about this many tokens: enough to fill a GPU, little memory.
BATCH_TOKENS = 8192


class LayerRunner:
    """Builds decoder layers of one model and runs them."""

    def __init__(
        self, reader: FloatModel | CheckpointReader, layer_map: LayerMap, device: str
    ) -> None:
        """Raises CheckpointError where transformers does not know the model's config."""
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
        # Soft caps and sinks exist in the plain implementation of attention only.
        capped = getattr(config, "attn_logit_softcapping", None) is not None
        self.eager = capped or bool(layer_map.family.sinks)
        config._attn_implementation = "eager" if self.eager else "sdpa"
        self.config = config
        module = importlib.import_module(model_class.__module__)
        family = architecture.removesuffix("ForCausalLM")
        self._layer_class = getattr(module, f"{family}DecoderLayer")
        self._norm_class = getattr(module, f"{family}RMSNorm")
        # That of a model which also sees pictures has a name of its own.
        rotary = getattr(module, f"{family}RotaryEmbedding", None)
        rotary = rotary or getattr(module, f"{family}TextRotaryEmbedding")
        self._rotary = rotary(config).to(device)
        # A CPU computes in float32; a GPU in the model's own 16 bits, with float32 statistics.
        stored = reader.entries[layer_map.embedding].dtype
        self.dtype = stored if torch.device(device).type == "cuda" else torch.float32
        self._positions: dict[tuple[int, str], Any] = {}

    def build(
        self,
        layer: int,
        state: Mapping[str, torch.Tensor],
        activation: Rounding | Mapping[str, Rounding] | None = None,
    ) -> nn.Module:
        """The layer as a module that holds `state`, in the computing dtype.

        `activation` is applied to the input of every linear, such as fake_quantize_tokens, or to
        those that it names.
        """
        with torch.device("meta"):
            module = self._make_layer(layer)
            twice = False
            if self.layer_map.has_own_linears(self.raw_config, layer):
                experts = self.layer_map.experts
                module.mlp.experts = Experts(self.layer_map, self.config, self.raw_config)
                setattr(module, experts.module, module.mlp)
                # Where experts stand under two names, the checkpoint's is the one.
                twice = experts.module != "mlp"
        wanted = [n for n in module.state_dict() if not (twice and n.startswith("mlp."))]
        missing = [name for name in wanted if name not in state]
        if missing:
            raise CheckpointError(f"{self.layer_map.prefix(layer)}.{missing[0]}", "is missing")
        built = module.state_dict()
        for name in wanted:
            if state[name].shape != built[name].shape:
                raise CheckpointError(
                    f"{self.layer_map.prefix(layer)}.{name}",
                    f"config.json states {list(built[name].shape)}, found"
                    f" {list(state[name].shape)}",
                    "mend config.json",
                )
        given = {name: state[name].to(self.device, self.dtype) for name in wanted}
        module.load_state_dict(given, assign=True, strict=not twice)
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

    def _make_layer(self, layer: int) -> nn.Module:
        """An empty layer. Raises CheckpointError where transformers cannot make it."""
        try:
            return self._layer_class(self.config, layer)
        # what its layers raise on a value that no check of the config refused
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                "config.json", f"transformers makes no layer of it: {type(error).__name__} {error}"
            ) from None

    def run(
        self,
        module: nn.Module,
        layer: int,
        hidden_BSD: torch.Tensor,
        cache: Any = None,
        grad: bool = False,
    ) -> torch.Tensor:
        """One layer on a batch of whole windows. `cache` sees keys and values (kv_range.py)."""
        length = hidden_BSD.shape[1]
        kind = self._kind(layer)
        if (length, kind) not in self._positions:
            ids_1S = torch.arange(length, device=self.device)[None]
            # One rotary embedding per kind of layer (Gemma 3), or one for all.
            accepted = inspect.signature(self._rotary.forward).parameters
            extra = (kind,) if "layer_type" in accepted else ()
            rotary = self._rotary(hidden_BSD[:1], ids_1S, *extra)
            self._positions[length, kind] = (ids_1S, rotary, self._mask(length, kind))
        position_ids, rotary, mask = self._positions[length, kind]
        with torch.set_grad_enabled(grad):
            output = module(
                hidden_BSD,
                attention_mask=mask,
                position_ids=position_ids,
                position_embeddings=rotary,
                past_key_values=cache,
                use_cache=False,
            )
        return output[0] if isinstance(output, tuple) else output

    def final_logits(
        self,
        hidden_SD: torch.Tensor,
        norm_D: torch.Tensor,
        head_VD: torch.Tensor,
        grad: bool = False,
    ) -> torch.Tensor:
        """Last norm and head, with the divisor and the soft cap of models that have them."""
        norm = self._norm_class(hidden_SD.shape[-1], eps=self.config.rms_norm_eps)
        norm.load_state_dict({"weight": norm_D.to(self.device, self.dtype)}, assign=True)
        norm.requires_grad_(False)
        with torch.set_grad_enabled(grad):
            logits_SV = norm(hidden_SD) @ head_VD.to(self.device, self.dtype).t()
        family = self.layer_map.family
        divisor = getattr(self.config, family.logits_divisor_key or "-", None)
        cap = getattr(self.config, family.logits_cap_key or "-", None)
        logits_SV = logits_SV if divisor is None else logits_SV / divisor
        return logits_SV if cap is None else torch.tanh(logits_SV / cap) * cap

    def has_state(self, layer: int) -> bool:
        """Whether a layer has a state in place of keys and values."""
        return self.layer_map.has_state(self.raw_config, layer)

    def _kind(self, layer: int) -> str:
        kinds = getattr(self.config, "layer_types", None)
        if kinds:
            return kinds[layer]
        sliding = getattr(self.config, "sliding_window", None)
        return "sliding_attention" if sliding else "full_attention"

    def _mask(self, length: int, kind: str) -> torch.Tensor | None:
        """None: causal, left to the attention kernel. Else additive [1, 1, S, S]."""
        window = self.config.sliding_window if kind == "sliding_attention" else None
        if not self.eager and (window is None or window >= length):
            return None
        ids_S = torch.arange(length, device=self.device)
        distance_SS = ids_S[:, None] - ids_S
        seen_SS = (distance_SS >= 0) & (distance_SS < (window or length))
        mask_SS = torch.zeros(length, length, dtype=self.dtype, device=self.device)
        return mask_SS.masked_fill_(~seen_SS, torch.finfo(self.dtype).min)[None, None]


class Experts(nn.ModuleList):
    """A linear for each matrix of each expert, as checkpoints store it.

    transformers' own hold all experts in one tensor, where no linear's input can be seen. The
    router and the shared expert stay transformers'.
    """

    def __init__(self, layer_map: LayerMap, config: Any, raw_config: dict[str, Any]) -> None:
        experts = layer_map.experts
        linears = (*experts.gate_up.linears, *experts.down.linears)
        self.names = [linear.name.rpartition(".")[2] for linear in linears]
        inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        outer = config.hidden_size
        shapes = ((outer, inner), (outer, inner), (inner, outer))
        super().__init__(
            nn.ModuleDict(
                {
                    name: nn.Linear(*shape, bias=False)
                    for name, shape in zip(self.names, shapes, strict=True)
                }
            )
            for _ in range(layer_map.num_experts(raw_config))
        )
        self.activation = ACT2FN[config.hidden_act]

    def forward(
        self, hidden_TD: torch.Tensor, expert_TC: torch.Tensor, share_TC: torch.Tensor
    ) -> torch.Tensor:
        output_TD = torch.zeros_like(hidden_TD)
        for number, expert in enumerate(self):
            token_T, choice_T = (expert_TC == number).nonzero(as_tuple=True)
            if len(token_T) == 0:
                continue
            gate, up, down = (expert[name] for name in self.names)
            seen_TD = hidden_TD[token_T]
            found_TD = down(self.activation(gate(seen_TD)) * up(seen_TD))
            share_T1 = share_TC[token_T, choice_T, None].to(found_TD.dtype)
            output_TD.index_add_(0, token_T, found_TD * share_T1)
        return output_TD


def batch_windows(length: int) -> int:
    """How many windows of so many tokens are run at once."""
    return max(1, BATCH_TOKENS // length)


class HiddenStates:
    """What every window is between two layers, [W, S, D]: in memory, or in a file to spare it."""

    def __init__(
        self,
        ids_WS: torch.Tensor,
        embedding_VD: torch.Tensor,
        runner: LayerRunner,
        spill: Path | None = None,
        before_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """Embed the windows. `spill`: a folder to hold the states in place of memory."""
        if int(ids_WS.max()) >= embedding_VD.shape[0]:
            raise InputError(
                "calibration data",
                f"has the token {int(ids_WS.max())}, but the model's vocabulary is"
                f" {embedding_VD.shape[0]}",
                "the tokenizer is another model's",
            )
        shape = (*ids_WS.shape, embedding_VD.shape[1])
        if spill is None:
            self.states_WSD = torch.empty(shape, dtype=runner.dtype, device=runner.device)
        else:
            self.states_WSD = _in_file(spill, shape, runner.dtype)
        scale = runner.layer_map.family.embedding_factor(runner.config.to_dict())
        for number, ids_S in enumerate(ids_WS):
            rows_SD = embedding_VD[ids_S.to(embedding_VD.device)].to(runner.dtype)
            self.states_WSD[number] = rows_SD * torch.tensor(scale, dtype=runner.dtype)
        self.batch, self.before_batch = batch_windows(ids_WS.shape[1]), before_batch

    def batches(self) -> Iterator[torch.Tensor]:
        """Views of whole windows, [B, S, D]."""
        for batch_BSD in self.states_WSD.split(self.batch):
            self.before_batch()
            yield batch_BSD

    def advance(
        self, runner: LayerRunner, module: nn.Module, layer: int, cache: Any = None
    ) -> None:
        """Replace the states by the layer's outputs. Raises InputError where one is not finite."""
        for batch_BSD in self.batches():
            output_BSD = runner.run(module, layer, batch_BSD.to(runner.device), cache)
            if not torch.isfinite(output_BSD).all():
                raise InputError(
                    runner.layer_map.prefix(layer),
                    "its outputs contain NaN or infinity",
                    "does the float model work? try --device cpu, which computes in float32",
                )
            batch_BSD.copy_(output_BSD)


def _in_file(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a file that has lost its name, so that nothing is left. Raises DiskError."""
    size = math.prod(shape)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            # All of its blocks now: without space for one, a write to memory would be fatal.
            os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
    except OSError as error:
        raise DiskError(
            f"--spill {folder}",
            f"cannot hold {size_text(size * dtype.itemsize)} of hidden states: {error.strerror}",
            "give a folder on a disk with more space",
        ) from None


def empty_statistics(
    runner: LayerRunner, layer: int, state: Mapping[str, torch.Tensor]
) -> dict[str, InputStatistics]:
    """Of each linear's input by local name, on the runner's device. Linears that share an input
    share the object."""
    statistics: dict[str, InputStatistics] = {}
    for group in runner.layer_map.inputs(runner.raw_config, layer):
        name = f"{runner.layer_map.prefix(layer)}.{group[0]}"
        width = state[f"{group[0]}.weight"].shape[1]
        stats = InputStatistics(width, runner.device, name)
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

    `reference` is the same windows in the float model. Raises InputError on a NaN, naming the
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
) -> None:
    """Run the layer over windows and add what its linears' inputs are to `statistics`.

    Where other devices add to them at the same time, `numbers` are those of the batches in all of
    the data, and `turns` lets each wait for the one before it: sums are then those of one device.
    """
    inputs: dict[InputStatistics, torch.Tensor] = {}
    hooks, shared = [], []
    for name, stats in statistics.items():
        if stats not in shared:  # of the linears that share it, the first
            shared.append(stats)
            hooks.append(
                module.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, stats=stats: inputs.__setitem__(stats, args[0])
                )
            )
    references = iter(reference.batches()) if reference is not None else None
    numbers = itertools.count() if numbers is None else numbers
    for batch_BSD, number in zip(hidden.batches(), numbers, strict=False):
        expected: dict[InputStatistics, torch.Tensor] = {}
        if references is not None:
            runner.run(module, layer, next(references).to(runner.device))
            expected = dict(inputs)
            inputs.clear()
        runner.run(module, layer, batch_BSD.to(runner.device))
        for stats in shared:
            # an expert's input may be in no token of a batch; it has its turn all the same
            x = inputs.get(stats)
            found = None if x is None else BatchSums.of(x, expected.get(stats))
            with nullcontext() if turns is None else turns.of(stats, number):
                if found is not None:
                    stats.add(found)
        inputs.clear()
    for hook in hooks:
        hook.remove()
