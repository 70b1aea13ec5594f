"""Quantize a float draft head: every matrix, including the output matrix.

The time of a draft is the time to read the head's weights, so no large matrix stays in float except
an embedding. For calibration the head runs on its target's states and drafts several tokens in a
row, as when it serves.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from calibrate.calibration.activations import fake_quantize_tokens
from calibrate.calibration.statistics import InputStatistics
from calibrate.heads.image_windows import HeadWindows
from calibrate.heads.rebuild import HeadModule
from calibrate.heads.target import Target
from calibrate.layer_map import find_layer_map
from calibrate.recipe import Recipe, find_recipe, integer_activations
from calibrate.results.report import REPORT, LinearReport, public_name, tool_versions
from calibrate.results.verify import REMEDY
from calibrate.solvers import rtn
from calibrate.solvers.solving import SolverError, check_solved
from calibrate.texts.data import DEFAULT_SAMPLES, CalibrationData, read_calibration
from calibrate.texts.image_windows import ChatReader
from formats.checkpoint import CheckpointReader, CheckpointWriter
from formats.errors import CheckpointError, InputError
from formats.heads.block_config import DFLASH, DSPARK
from formats.heads.config import EAGLE3, PEAGLE
from formats.heads.folder import HeadFolder
from formats.hub.fetch import local_path
from formats.hub.selection import DRAFTER
from formats.in_memory.weights import Weight, same_weight, with_activation
from formats.layouts import decode_linear
from formats.numerics.finite import check_finite
from formats.plan import Plan, make_plan
from formats.quant_config import BLOCK
from formats.scheme import Scheme
from formats.table import size_text, text_table

DEFAULT_LENGTH = 512
WITH_AUX = (EAGLE3, PEAGLE, DFLASH, DSPARK)  # types of heads that read auxiliary hidden states
JUDGED = 8  # one window in this many is held out for evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReport:
    """Result of quantizing a head."""

    source: str
    kind: str
    scheme: str
    recipe: str
    format: str
    linears: tuple[LinearReport, ...]
    bytes_before: int
    bytes_after: int
    # By step: fraction of positions whose most likely token equals the target's. None without data
    accuracy_before: tuple[float, ...] | None
    accuracy_after: tuple[float, ...] | None
    left_in_float: dict[str, str]
    seconds: float
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        rows = [linear.cells() for linear in self.linears]
        lines = [text_table(("linear", "N x K", "error", "output"), rows), ""]
        lines += [f"{linear.name}: {note}" for linear in self.linears for note in linear.notes]
        lines.append(
            f"{self.kind} head: {len(self.linears)} linears to {self.scheme} by {self.recipe}, as"
            f" {self.format}, in {self.seconds:.1f} s"
        )
        if self.accuracy_after is not None:
            steps = zip(self.accuracy_before, self.accuracy_after, strict=True)
            lines.append(
                "most likely token equals the target's:"
                + ", ".join(f"{before:.3f} -> {after:.3f}" for before, after in steps)
            )
        lines.append(f"{size_text(self.bytes_before)} -> {size_text(self.bytes_after)}")
        lines += [f"left in float: {name}: {why}" for name, why in self.left_in_float.items()]
        return "\n".join(lines)


def quantize_head(
    source: str | Path,
    output: str | Path,
    *,
    scheme: Scheme,
    target: str | Path | None = None,
    recipe: str | Recipe | None = None,
    output_format: str | None = None,
    ignore: Sequence[str] = (),
    overrides: Iterable[tuple[str, Scheme]] = (),
    calibration: str | CalibrationData | None = None,
    samples: int = DEFAULT_SAMPLES,
    sequence_length: int = DEFAULT_LENGTH,
    seed: int = 0,
    bos: bool = True,
    device: str = "cpu",
    progress: bool = True,
    quantizer: str = "qserve-kit",
    chats: ChatReader | None = None,
) -> HeadReport:
    """Quantize the draft head `source` and write the new folder `output`.

    `source` and `target` (the model that the head drafts for) are folders or hub names. Recipes
    that need data need the target. `recipe` None: "gptq" at 4 bits and fewer if there is a target,
    else "rtn". Recipes with transforms are rejected, because a head has few norms and factors would
    move into the target's states. `chats` reads chats with images, for a vision-language target.
    Raises InputError before anything is written.
    """
    started = time.perf_counter()
    source = local_path(source, DRAFTER)
    target = target and local_path(target)
    folder = HeadFolder(source)
    if folder.quant is not None:
        raise InputError(str(source), f"config.json has a {BLOCK}", "start from the float head")
    recipe = _recipe(recipe, scheme, target)
    shapes = {folder.stored(name): shape for name, shape in folder.linear_shapes().items()}
    plan = make_plan(
        shapes, scheme, output_format=output_format, ignore=ignore, overrides=list(overrides)
    )
    _check_dynamic(plan)
    head = data = None
    statistics: dict[str, InputStatistics] = {}
    before = after = None
    if target is not None:
        head = _open(folder, target, device)
        data = _windows(head.target, calibration, samples, sequence_length, seed, bos, chats)
        statistics = _statistics(head, data.of(_kept(len(data), False)), progress)
        before = _accuracies(head, data)
    packed, reports = _solved(folder, plan, recipe, statistics, device, progress)
    if head is not None:
        for name, weight in packed.items():
            _put_back(head, folder, name, weight, plan.schemes[name])
        after = _accuracies(head, data)
    with CheckpointWriter(output) as writer:
        for name in folder.entries:
            module = name.removesuffix(".weight")
            if module in packed:
                for leaf, tensor in plan.layout.encode(packed[module], module).items():
                    writer.add(f"{module}.{leaf}", tensor)
            else:
                writer.add(name, folder.get(name))
        block = plan.config(quantizer).to_dict()
        staged = writer.seal({**folder.raw, BLOCK: block}, side_files_from=folder.folder)
        if plan.layout.second_file is not None:
            writer.write_json(plan.layout.second_file, block)
        num_bytes = _verify(staged, folder, packed, plan)
        report = HeadReport(
            source=public_name(source),
            kind=folder.config.kind,
            scheme=str(scheme),
            recipe=recipe.name,
            format=plan.layout.name,
            linears=tuple(reports),
            bytes_before=sum(entry.num_bytes for entry in folder.entries.values()),
            bytes_after=num_bytes,
            accuracy_before=before,
            accuracy_after=after,
            left_in_float=plan.reasons,
            seconds=time.perf_counter() - started,
            versions={"quantizer": quantizer, **tool_versions()},
        )
        writer.write_json(REPORT, report.to_dict())
        writer.publish()
    return report


def _recipe(recipe: str | Recipe | None, scheme: Scheme, target: str | Path | None) -> Recipe:
    """Find and check the recipe. Raises InputError."""
    if recipe is None:
        is_small = scheme.weight.type == "int" and scheme.weight.bits <= 4
        recipe = "gptq" if is_small and target is not None else "rtn"
    found = find_recipe(recipe)
    if found.transforms or found.corrects or found.tuning:
        raise InputError(
            f"recipe {found.name!r}",
            "rewrites decoder layers, which a head does not have",
            "use gptq or rtn",
        )
    if found.needs_data and target is None:
        raise InputError(
            f"recipe {found.name!r}",
            "runs the head on the states of its target model",
            "add `target` MODEL, or use `recipe` rtn",
        )
    return found


def _check_dynamic(plan: Plan) -> None:
    for name, scheme in plan.quantized.items():
        if scheme.activation is not None and not scheme.activation.dynamic:
            raise InputError(f"scheme {scheme}", f"{name} requires a static scale", "use w8a8")


def _open(folder: HeadFolder, target: str | Path, device: str) -> HeadModule:
    aux_layers: tuple[int, ...] = ()
    if folder.config.kind in WITH_AUX:
        config = CheckpointReader(target).config
        aux_layers = folder.config.aux_layers(find_layer_map(config).num_layers(config))
    return HeadModule(folder, Target(target, device=device, aux_layers=aux_layers))


def _windows(
    target: Target,
    calibration: str | CalibrationData | None,
    samples: int,
    sequence_length: int,
    seed: int,
    bos: bool,
    chats: ChatReader | None,
) -> HeadWindows:
    if not isinstance(calibration, CalibrationData):
        calibration = read_calibration(
            calibration,
            target.tokenizer,
            samples=samples,
            sequence_length=min(sequence_length, target.config.max_position_embeddings),
            seed=seed,
            bos=bos,
            chats=chats if target.has_vision else None,
        )
    return HeadWindows.of_data(calibration)


def _kept(count: int, judged: bool) -> list[int]:
    """Return the numbers of the held-out windows (`judged`) or of the others.

    With too few windows, all are used for both.
    """
    numbers = range(count)
    chosen = [number for number in numbers if (number % JUDGED == JUDGED - 1) == judged]
    return chosen or list(numbers)


def _statistics(
    head: HeadModule, windows: HeadWindows, progress: bool
) -> dict[str, InputStatistics]:
    """Run the head on the windows; return statistics of each linear's input, by canonical name."""
    found: dict[str, InputStatistics] = {}
    hooks = []
    for name in head.folder.linear_shapes():
        linear = head.linear(name)
        found[name] = InputStatistics(linear.in_features, head.target.device, name)
        hooks.append(
            linear.register_forward_pre_hook(
                lambda _, args, stats=found[name]: stats.update(args[0])
            )
        )
    numbers = range(len(windows))
    with tqdm(numbers, desc="Running the head", unit="window", disable=not progress) as bar:
        for number in bar:
            for _ in head.judged(windows.of([number])):
                pass
    for hook in hooks:
        hook.remove()
    for stats in found.values():
        stats.check()
    return found


def _accuracies(head: HeadModule, windows: HeadWindows) -> tuple[float, ...]:
    rows = [
        [float(right) for _, right in head.judged(windows.of([number]))]
        for number in _kept(len(windows), True)
    ]
    return tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))


def _solved(
    folder: HeadFolder,
    plan: Plan,
    recipe: Recipe,
    statistics: Mapping[str, InputStatistics],
    device: str,
    progress: bool,
) -> tuple[dict[str, Weight], list[LinearReport]]:
    """Solve all linears. Returns (weights by the file's names, their reports)."""
    packed: dict[str, Weight] = {}
    reports = []
    canonical = {folder.stored(name): name for name in folder.linear_shapes()}
    with tqdm(plan.quantized.items(), unit="linear", disable=not progress) as bar:
        for name, scheme in bar:
            weight_NK = folder.get(f"{name}.weight").to(device)
            check_finite(f"{name}.weight", weight_NK)
            stats = statistics.get(canonical[name])
            began, notes = time.perf_counter(), []
            try:
                weight = recipe.solver(weight_NK.clone(), stats, scheme.weight, name)
            except SolverError as error:
                weight = rtn.solve(weight_NK, None, scheme.weight, name)
                notes.append(f"rounded to nearest: {error.problem}")
            check_solved(weight_NK, weight, scheme.weight, name)
            packed[name] = with_activation(weight, scheme, None, name)
            reports.append(
                LinearReport.measure(
                    weight_NK,
                    packed[name],
                    scheme,
                    name=name,
                    seconds=time.perf_counter() - began,
                    stats=stats,
                    notes=(*notes, *(stats.notes if stats is not None else ())),
                )
            )
    return packed, reports


def _put_back(
    head: HeadModule, folder: HeadFolder, stored: str, weight: Weight, scheme: Scheme
) -> None:
    """Replace a matrix in the module by its dequantized weight, and round its inputs."""
    canonical = next(name for name in folder.linear_shapes() if folder.stored(name) == stored)
    linear = head.linear(canonical)
    linear.weight.data.copy_(weight.dequantize())
    if integer_activations(scheme):
        linear.register_forward_pre_hook(partial(_rounded, fake_quantize_tokens))


def _rounded(rounding: Any, _: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (rounding(args[0]),)


def _verify(staged: Path, source: HeadFolder, packed: Mapping[str, Weight], plan: Plan) -> int:
    """Read the written folder back and compare it; return its size in bytes.

    Raises CheckpointError, naming the tensor that differs.
    """
    written = HeadFolder(staged)
    for name, weight in packed.items():
        prefix = f"{name}."
        tensors = {
            entry.removeprefix(prefix): written.get(entry)
            for entry in written.entries
            if entry.startswith(prefix) and entry.removeprefix(prefix) in plan.layout.fields
        }
        found = decode_linear(name, tensors, written.quant)
        different = same_weight(found, weight.to("cpu"))
        if different is not None:
            raise CheckpointError(name, f"its {different} differ from the solver's result", REMEDY)
    for name in source.entries:
        kept = name.removesuffix(".weight") not in packed
        if kept and not torch.equal(written.get(name), source.get(name)):
            raise CheckpointError(
                name, "differs from the source, although it is not quantized", REMEDY
            )
    return sum(entry.num_bytes for entry in written.entries.values())
