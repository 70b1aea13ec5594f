"""From a float model folder to a quantized one, one decoder layer at a time.

Knows the order of the work; the maths is the solver's, the bytes are formats'. At any time it holds
one linear and the shard that is being filled, whatever the model's size.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from calibrate.layer_map import LayerMap, find_layer_map
from calibrate.recipe import find_solver
from calibrate.report import REPORT, LinearReport, QuantizationReport, tool_versions
from calibrate.verify import LinearDigest, kept_tensors, verify
from formats.checkpoint import DEFAULT_MAX_SHARD_BYTES, CheckpointReader, CheckpointWriter
from formats.errors import CheckpointError, InputError
from formats.padding import make_padding
from formats.plan import Plan, make_plan
from formats.quant_config import BLOCK
from formats.scheme import Scheme
from formats.weights import with_activation

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_NAMES_SHOWN = 8


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    scheme: Scheme,
    recipe: str = "rtn",
    output_format: str | None = None,
    ignore: Sequence[str] = (),
    overrides: Iterable[tuple[str, Scheme]] = (),
    pad: bool = False,
    input_scales: Mapping[str, torch.Tensor | float] | None = None,
    device: str = "cpu",
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    progress: bool = True,
    quantizer: str = "qserve-kit",
) -> QuantizationReport:
    """Quantize every linear of every decoder layer of `source` and write `target`.

    `output_format` None: the scheme's default. `ignore`, `overrides` and `pad`: see formats/plan.py
    and formats/padding.py. `input_scales`: of static activations, by linear. Norms, biases,
    embeddings and head are copied bit for bit. `target` appears only when it is complete and has
    been read back. `quantizer` ("tool:version") is recorded. Raises InputError on anything that the
    user can mend, before the first weight is read where possible; nothing is left behind then.
    """
    began = time.perf_counter()
    reader = CheckpointReader(source)
    layer_map = find_layer_map(reader.config)
    solve = find_solver(recipe)
    _check_device(device)
    shapes = _check_source(reader, layer_map)
    plan = make_plan(
        shapes,
        scheme,
        output_format=output_format,
        ignore=ignore,
        overrides=overrides,
        padding=make_padding(reader.config, shapes, scheme) if pad else None,
    )
    layout, linears = plan.layout, plan.quantized
    _check_input_scales(linears, input_scales or {})
    block = plan.config(quantizer).to_dict()

    num_layers = layer_map.num_layers(reader.config)
    kept = kept_tensors(reader, linears)
    digests: dict[str, LinearDigest] = {}
    reports: list[LinearReport] = []
    with (
        CheckpointWriter(target, max_shard_bytes=max_shard_bytes) as writer,
        tqdm(total=len(linears), unit="linear", disable=not progress) as bar,
    ):
        for layer in range(num_layers):
            prefix = layer_map.prefix(layer)
            for name in [n for n in layer_map.linear_names(layer) if n in linears]:
                bar.set_description(f"layer {layer + 1}/{num_layers} {name[len(prefix) + 1 :]}")
                weight_NK = _read(reader, f"{name}.weight", plan, device)
                started = time.perf_counter()
                packed = solve(weight_NK, linears[name].weight, name)
                seconds = time.perf_counter() - started
                packed = with_activation(
                    packed, linears[name], (input_scales or {}).get(name), name
                )
                tensors = layout.encode(packed, name)
                for field, tensor in tensors.items():
                    writer.add(f"{name}.{field}", tensor)
                digests[name] = LinearDigest.of(packed, tensors)
                reports.append(
                    LinearReport.measure(
                        weight_NK,
                        packed,
                        linears[name],
                        name=name,
                        seconds=seconds,
                        num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
                    )
                )
                bar.update()
            for name in kept:
                if name.startswith(prefix + "."):
                    writer.add(name, _read(reader, name, plan))
            kept = [name for name in kept if not name.startswith(prefix + ".")]
        for name in kept:  # embeddings, last norm, head
            writer.add(name, _read(reader, name, plan))

        changes = plan.padding.config_changes if plan.padding else {}
        config = {**reader.config, **changes, BLOCK: block}
        staged = writer.seal(config, side_files_from=reader.folder)
        if layout.second_file is not None:
            writer.write_json(layout.second_file, block)
        bar.set_description("reading back")
        verify(staged, digests, reader, plan.padding)
        report = QuantizationReport(
            source=str(source),
            scheme=str(scheme),
            recipe=recipe,
            format=layout.name,
            linears=tuple(reports),
            bytes_before=sum(entry.num_bytes for entry in reader.entries.values()),
            bytes_after=sum(e.num_bytes for e in CheckpointReader(staged).entries.values()),
            versions={"quantizer": quantizer, **tool_versions()},
            seconds=time.perf_counter() - began,
            left_in_float=plan.reasons,
        )
        writer.write_json(REPORT, report.to_dict())
        writer.publish()
    return report


def _read(reader: CheckpointReader, name: str, plan: Plan, device: str = "cpu") -> torch.Tensor:
    tensor = reader.get(name, device)
    return plan.padding.apply(name, tensor) if plan.padding else tensor


def _check_input_scales(
    linears: Mapping[str, Scheme], input_scales: Mapping[str, torch.Tensor | float]
) -> None:
    for name, scheme in linears.items():
        static = scheme.activation is not None and not scheme.activation.dynamic
        if static and name not in input_scales:
            raise InputError(
                f"scheme {scheme}",
                f"needs calibration data: {name} has no scale for its inputs",
                "use a recipe that calibrates, or a scheme with dynamic activations",
            )


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        problem = str(error).splitlines()[0]
        raise InputError(f"device {device!r}", f"cannot be used: {problem}", "use cpu") from None


def _check_source(reader: CheckpointReader, layer_map: LayerMap) -> dict[str, tuple[int, int]]:
    """Everything that the headers can tell, so that no run fails at its last layer for it.

    Returns [N, K] of every linear.
    """
    quantized = [name for name in reader.entries if name.endswith(".qweight")]
    if reader.config.get(BLOCK) is not None or quantized:
        found = f"its config.json has a {BLOCK}" if BLOCK in reader.config else quantized[0]
        raise CheckpointError(
            str(reader.folder), f"is quantized already: {found}", "start from the float model"
        )
    required = layer_map.required_tensors(reader.config)
    missing = [name for name in required if name not in reader]
    if missing:
        more = f" and {len(missing) - MAX_NAMES_SHOWN} more" * (len(missing) > MAX_NAMES_SHOWN)
        raise CheckpointError(
            str(reader.folder),
            f"tensors missing: {', '.join(missing[:MAX_NAMES_SHOWN])}{more}",
            "the checkpoint is incomplete, or config.json is another model's",
        )
    shapes = {}
    for layer in range(layer_map.num_layers(reader.config)):
        for name in layer_map.linear_names(layer):
            entry = reader.entries[f"{name}.weight"]
            if entry.dtype not in FLOAT_DTYPES or len(entry.shape) != 2:
                raise CheckpointError(
                    f"{name}.weight",
                    f"expected a float matrix, found {entry.dtype} {list(entry.shape)}",
                    "start from the float model",
                )
            shapes[name] = entry.shape
    return shapes
