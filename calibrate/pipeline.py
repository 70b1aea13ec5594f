"""From a float model folder to a quantized one, one decoder layer at a time.

Knows the order of the work; the maths is the solver's, the bytes are formats'. At any time it holds
one linear and the shard that is being filled, whatever the model's size.
"""

import time
from pathlib import Path

import torch
from tqdm import tqdm

from calibrate.layer_map import LayerMap, find_layer_map
from calibrate.recipe import find_solver
from calibrate.report import REPORT, LinearReport, QuantizationReport, tool_versions
from calibrate.verify import QUANTIZE_CONFIG, LinearDigest, kept_tensors, verify
from formats import gptq
from formats.checkpoint import DEFAULT_MAX_SHARD_BYTES, CheckpointReader, CheckpointWriter
from formats.errors import CheckpointError, InputError, SchemeError
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme

OUTPUT_FORMATS = ("gptq",)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_NAMES_SHOWN = 8


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    scheme: Scheme,
    recipe: str = "rtn",
    output_format: str = "gptq",
    device: str = "cpu",
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    progress: bool = True,
    quantizer: str = "qserve-kit",
) -> QuantizationReport:
    """Quantize every linear of every decoder layer of `source` and write `target`.

    Norms, biases, embeddings and head are copied bit for bit. `target` appears only when it is
    complete and has been read back. `quantizer` ("tool:version") is recorded. Raises InputError on
    anything that the user can mend, before the first weight is read where possible; nothing is left
    behind then.
    """
    began = time.perf_counter()
    reader = CheckpointReader(source)
    layer_map = find_layer_map(reader.config)
    solve = find_solver(recipe)
    _check_output_format(output_format, scheme)
    _check_device(device)
    _check_source(reader, layer_map, scheme)
    block = QuantConfig(scheme=scheme, quantizer=quantizer).to_dict()

    num_layers = layer_map.num_layers(reader.config)
    linears = dict.fromkeys(n for i in range(num_layers) for n in layer_map.linear_names(i))
    kept = kept_tensors(reader, linears)
    digests: dict[str, LinearDigest] = {}
    reports: list[LinearReport] = []
    with (
        CheckpointWriter(target, max_shard_bytes=max_shard_bytes) as writer,
        tqdm(total=len(linears), unit="linear", disable=not progress) as bar,
    ):
        for layer in range(num_layers):
            prefix = layer_map.prefix(layer)
            for name in layer_map.linear_names(layer):
                bar.set_description(f"layer {layer + 1}/{num_layers} {name[len(prefix) + 1 :]}")
                weight_NK = reader.get(f"{name}.weight", device)
                started = time.perf_counter()
                packed = solve(weight_NK, scheme.weight, name)
                seconds = time.perf_counter() - started
                tensors = gptq.encode(packed, name)
                for field, tensor in tensors.items():
                    writer.add(f"{name}.{field}", tensor)
                digests[name] = LinearDigest.of(packed)
                reports.append(
                    LinearReport.measure(
                        weight_NK,
                        packed,
                        scheme,
                        name=name,
                        seconds=seconds,
                        num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
                    )
                )
                bar.update()
            for name in kept:
                if name.startswith(prefix + "."):
                    writer.add(name, reader.get(name))
            kept = [name for name in kept if not name.startswith(prefix + ".")]
        for name in kept:  # embeddings, last norm, head
            writer.add(name, reader.get(name))

        staged = writer.seal({**reader.config, BLOCK: block}, side_files_from=reader.folder)
        writer.write_json(QUANTIZE_CONFIG, block)
        bar.set_description("reading back")
        verify(staged, digests, reader)
        report = QuantizationReport(
            source=str(source),
            scheme=str(scheme),
            recipe=recipe,
            format=output_format,
            linears=tuple(reports),
            bytes_before=sum(entry.num_bytes for entry in reader.entries.values()),
            bytes_after=sum(e.num_bytes for e in CheckpointReader(staged).entries.values()),
            versions={"quantizer": quantizer, **tool_versions()},
            seconds=time.perf_counter() - began,
        )
        writer.write_json(REPORT, report.to_dict())
        writer.publish()
    return report


def _check_output_format(output_format: str, scheme: Scheme) -> None:
    if output_format not in OUTPUT_FORMATS:
        raise InputError(
            f"format {output_format!r}", "unknown", f"known formats: {', '.join(OUTPUT_FORMATS)}"
        )
    if not scheme.weight.symmetric:
        raise SchemeError(
            f"scheme {scheme}",
            "cannot be written as gptq: its v1 layout cannot hold a zero point of 0, and vLLM loads"
            " only symmetric GPTQ",
            "use a symmetric scheme",
        )


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        problem = str(error).splitlines()[0]
        raise InputError(f"device {device!r}", f"cannot be used: {problem}", "use cpu") from None


def _check_source(reader: CheckpointReader, layer_map: LayerMap, scheme: Scheme) -> None:
    """Everything that the headers can tell, so that no run fails at its last layer for it."""
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
    for layer in range(layer_map.num_layers(reader.config)):
        for name in layer_map.linear_names(layer):
            entry = reader.entries[f"{name}.weight"]
            if entry.dtype not in FLOAT_DTYPES or len(entry.shape) != 2:
                raise CheckpointError(
                    f"{name}.weight",
                    f"expected a float matrix, found {entry.dtype} {list(entry.shape)}",
                    "start from the float model",
                )
            scheme.weight.check_shape(name, *entry.shape)
