"""GPTQ for any causal language model of transformers that has a list of decoder layers.

The layers run one after the other over the calibration text, each with the arguments that the model
passes to it. Each linear is solved for its own inputs, and the next layer reads the outputs of the
quantized layer. Models in the table of families use pipeline.py instead.

Legend: W windows, S tokens of a window, C hidden size.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from tqdm import tqdm

from calibrate.calibration.statistics import InputStatistics
from calibrate.solvers import gptq
from calibrate.solvers.solving import SolverError
from formats.errors import InputError
from formats.in_memory.weights import Weight, round_to_nearest
from formats.scheme import QuantSpec

__all__ = ["solve_layers"]

logger = logging.getLogger(__name__)

# Largest relative distance between the states of layers run one by one and the model's own states
TOLERANCE = 1e-3


class _Recorder(nn.Module):
    """Replacement of a layer that records the call's arguments and returns its input."""

    def __init__(self, returns_tuple: bool) -> None:
        super().__init__()
        self.returns_tuple = returns_tuple
        self.hidden_1SC: torch.Tensor | None = None
        self.others: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def forward(self, hidden_1SC: torch.Tensor, *others: Any, **named: Any) -> Any:
        self.hidden_1SC, self.others = hidden_1SC, (others, named)
        return (hidden_1SC,) if self.returns_tuple else hidden_1SC


class _Chain:
    """Runs the decoder layers of a model one by one."""

    def __init__(self, model: Any, names: Sequence[str], subject: str) -> None:
        self.model, self.subject = model, subject
        self.name, self.layers = _find_layers(model, names, subject)
        self._returns_tuple = False
        self._others: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def start(self, ids_WS: torch.Tensor) -> list[torch.Tensor]:
        """Return the first layer's input for each window, [1, S, C].

        The other arguments of each layer are recorded on the first window and reused for all
        windows. Raises InputError if, on the last window, the states after the last layer differ
        from those of the whole model.
        """
        outputs: list[Any] = [None] * len(self.layers)
        hooks = [
            layer.register_forward_hook(
                lambda _, inputs, output, number=number: outputs.__setitem__(number, output)
            )
            for number, layer in enumerate(self.layers)
        ]
        self._call(ids_WS[-1])
        for hook in hooks:
            hook.remove()
        self._returns_tuple = isinstance(outputs[0], tuple)
        recorders = [_Recorder(self._returns_tuple) for _ in self.layers]
        own = list(self.layers)
        states = []
        try:
            self._replace(recorders)
            for ids_S in ids_WS:
                self._call(ids_S)
                states.append(recorders[0].hidden_1SC)
                self._others = self._others or [each.others for each in recorders]
        finally:
            self._replace(own)
        hidden_1SC = states[-1]
        for number in range(len(own)):
            hidden_1SC = self.run(number, hidden_1SC)
        want_1SC = outputs[-1][0] if self._returns_tuple else outputs[-1]
        distance = (hidden_1SC - want_1SC).norm() / want_1SC.norm()
        if not distance < TOLERANCE:
            raise InputError(
                self.subject,
                f"its layers read more than hidden states (relative distance {distance:.3g}), so"
                " they cannot run one by one",
                "use `recipe` rtn",
            )
        return states

    def _replace(self, modules: Sequence[nn.Module]) -> None:
        for number, module in enumerate(modules):
            self.layers[number] = module

    def _call(self, ids_S: torch.Tensor) -> None:
        try:
            positions_1S = torch.arange(len(ids_S), device=ids_S.device)[None]
            self.model.base_model(input_ids=ids_S[None], position_ids=positions_1S, use_cache=False)
        except Exception as error:  # model code may raise anything
            raise InputError(
                self.subject, f"its model does not run: {error}", "use `recipe` rtn"
            ) from error

    def run(self, number: int, hidden_1SC: torch.Tensor) -> torch.Tensor:
        """Return the states after layer `number`, on that layer's device."""
        like = next(self.layers[number].parameters())

        def moved(value: Any) -> Any:
            is_tensor = isinstance(value, torch.Tensor)
            return value.to(like.device) if is_tensor else value

        others, named = tree_map(moved, self._others[number])
        output = self.layers[number](hidden_1SC.to(like.device), *others, **named)
        return output[0] if isinstance(output, tuple) else output


def _find_layers(model: Any, names: Sequence[str], subject: str) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of decoder layers: the first ModuleList that contains `names`.

    Raises InputError if there is none.
    """
    for name, module in model.named_modules():
        is_above = all(each.startswith(f"{name}.") for each in names)
        if isinstance(module, nn.ModuleList) and is_above:
            return name, module
    raise InputError(subject, "has no list of decoder layers", "use `recipe` rtn")


@torch.inference_mode()
def solve_layers(
    model: Any,
    names: Sequence[str],
    ids_WS: torch.Tensor,
    spec: QuantSpec,
    *,
    device: str = "cpu",
    subject: str = "model",
    progress: bool = True,
) -> dict[str, Weight]:
    """Quantize the linears `names` of a model by GPTQ and return their weights.

    The model's weights are replaced by the dequantized values. A linear that no token reached, such
    as an unused expert's, is rounded to nearest. Raises InputError for a model whose layers cannot
    run one by one.
    """
    chain = _Chain(model, names, subject)
    states = [hidden.cpu() for hidden in chain.start(ids_WS)]
    found: dict[str, Weight] = {}
    shown = None if progress else True
    with tqdm(chain.layers, desc="Quantizing layers", disable=shown) as bar:
        for number, layer in enumerate(bar):
            prefix = f"{chain.name}.{number}."
            linears = {name: model.get_submodule(name) for name in names if name.startswith(prefix)}
            layer.to(device)
            statistics = _statistics(chain, number, linears, states, device)
            for name, linear in linears.items():
                weight = _solved(name, linear.weight.float(), statistics[name], spec)
                linear.weight.copy_(weight.dequantize())
                found[name] = weight.to("cpu")
            states = [chain.run(number, hidden).cpu() for hidden in states]
            layer.to("cpu")
    return found


def _statistics(
    chain: _Chain,
    number: int,
    linears: dict[str, nn.Linear],
    states: list[torch.Tensor],
    device: str,
) -> dict[str, InputStatistics]:
    """Run a layer over all windows and return the statistics of each linear's input.

    Linears that read the same tensor share one object.
    """
    statistics: dict[str, InputStatistics] = {}
    read: dict[str, torch.Tensor] = {}
    hooks = [
        linear.register_forward_pre_hook(
            lambda _, inputs, name=name: read.__setitem__(name, inputs[0])
        )
        for name, linear in linears.items()
    ]
    for hidden in states:
        read.clear()
        chain.run(number, hidden)
        if not statistics:
            by_input: dict[int, InputStatistics] = {}
            for name, linear in linears.items():
                key = id(read.get(name, linear))
                new = InputStatistics(linear.in_features, device, name)
                statistics[name] = by_input.setdefault(key, new)
        done: set[int] = set()
        for name, x in read.items():
            if id(statistics[name]) not in done:
                statistics[name].update(x.reshape(-1, x.shape[-1]))
                done.add(id(statistics[name]))
    for hook in hooks:
        hook.remove()
    for each in statistics.values():
        each.check()
    return statistics


def _solved(name: str, weight_NK: torch.Tensor, stats: InputStatistics, spec: QuantSpec) -> Weight:
    try:
        return gptq.solve(weight_NK, stats, spec, name)
    except SolverError as error:
        logger.warning("%s is rounded to nearest: %s", name, error.problem)
        return round_to_nearest(weight_NK, spec, name)
