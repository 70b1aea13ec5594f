"""From a float model folder to a quantized one, one decoder layer at a time.

Knows the order of the work; the maths is the recipe's, the bytes are formats'. At any time it holds
one layer, the calibration data's hidden states and the shard that is being filled, whatever the
model's size. A killed run goes on where it was.
"""

import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from calibrate.activations import fake_quantize_tokens
from calibrate.data import DEFAULT_LENGTH, DEFAULT_SAMPLES, CalibrationData, read_calibration
from calibrate.evaluate import make_windows, read_texts
from calibrate.journal import Journal
from calibrate.layer import check_weights, load_transforms, quantize_layer
from calibrate.layer_map import LayerMap, find_layer_map
from calibrate.recipe import Recipe, find_recipe, integer_activations
from calibrate.report import REPORT, LinearReport, QuantizationReport, tool_versions
from calibrate.report_html import REPORT_HTML, to_html
from calibrate.solving import LayerContext, LayerState
from calibrate.verify import QUANTIZE_CONFIG, LinearDigest, kept_tensors, tensor_digest, verify
from formats import gptq
from formats.checkpoint import DEFAULT_MAX_SHARD_BYTES, CheckpointReader, CheckpointWriter
from formats.errors import CheckpointError, InputError, SchemeError
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme

OUTPUT_FORMATS = ("gptq",)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_NAMES_SHOWN = 8
EVAL_WINDOWS, EVAL_LENGTH = 48, 1024
log = logging.getLogger(__name__)


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    scheme: Scheme,
    recipe: str | Recipe = "rtn",
    output_format: str = "gptq",
    calibration: str | CalibrationData | None = None,
    samples: int = DEFAULT_SAMPLES,
    sequence_length: int = DEFAULT_LENGTH,
    seed: int = 0,
    eval_text: str | None = None,
    spill: str | Path | None = None,
    device: str = "cpu",
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    progress: bool = True,
    quantizer: str = "qserve-kit",
) -> QuantizationReport:
    """Quantize every linear of every decoder layer of `source` and write `target`.

    What is not quantized is copied bit for bit, unless a transform of the recipe folds into it.
    `target` appears only when it is complete and has been read back. The recipe is a row of RECIPES
    or one's own Recipe; "rtn" needs no data. `calibration` is a file, a data set's name, or windows
    of token ids; None: the shipped texts, where the recipe needs data. With `eval_text` both
    models' perplexity is measured. `spill` is a folder for the data's hidden states, to spare
    memory. `quantizer` ("tool:version") is recorded. Raises InputError on anything that the user
    can mend, before the first weight is read where possible; nothing is left behind then.
    """
    clock = _Clock()
    reader = CheckpointReader(source)
    layer_map = find_layer_map(reader.config)
    recipe = find_recipe(recipe)
    _check_output_format(output_format, scheme)
    _check_device(device)
    _check_source(reader, layer_map, scheme)
    data = _read_data(reader, recipe, calibration, samples, sequence_length, seed)
    evaluation_WS = _read_evaluation(reader, eval_text)
    block = QuantConfig(scheme=scheme, quantizer=quantizer).to_dict()
    activation_bits = integer_activations(scheme)
    context = LayerContext(
        layer_map=layer_map,
        config=reader.config,
        spec=scheme.weight,
        activation_bits=activation_bits,
        seed=seed,
    )
    identity = _identity(reader, scheme, recipe, data, seed, device)

    num_layers = layer_map.num_layers(reader.config)
    linears = dict.fromkeys(
        name for i in range(num_layers) for name in layer_map.linear_names(i, reader.config)
    )
    kept = kept_tensors(reader, linears)
    digests: dict[str, LinearDigest] = {}
    rewritten: dict[str, str] = {}
    reports: list[LinearReport] = []
    with (
        CheckpointWriter(target, max_shard_bytes=max_shard_bytes) as writer,
        Journal(target, identity) as journal,
        tqdm(total=len(linears), unit="linear", disable=not progress) as bar,
    ):
        model_tensors = _rewrite_model(reader, layer_map, recipe, context)
        stream = None
        if data is not None or evaluation_WS is not None:
            stream = _open_stream(
                reader,
                layer_map,
                recipe,
                model_tensors,
                data,
                evaluation_WS,
                activation_bits,
                spill,
                device,
            )
        for layer in range(num_layers):
            prefix = layer_map.prefix(layer)
            show = partial(_show, bar, f"layer {layer + 1}/{num_layers}")
            original = _read_layer(reader, layer_map, layer, device)
            in_layer = replace(context, prefix=prefix, notes=[])
            state = load_transforms(original, recipe, in_layer)
            finished = journal.read(layer, device)
            if finished is None:
                with clock("statistics"):
                    show("running the data", advance=0)
                    statistics = stream.statistics(layer, state) if stream else {}
                with clock("solving"):
                    finished = quantize_layer(
                        original,
                        state,
                        statistics,
                        scheme=scheme,
                        recipe=recipe,
                        context=in_layer,
                        before_linear=show,
                    )
                del statistics
                journal.write(layer, finished)
            else:
                show("found finished", advance=len(finished.packed))
            if stream is not None:
                with clock("next inputs"):
                    stream.advance(layer, original, state, finished.apply(original))
            with clock("writing"):
                for local, packed in finished.packed.items():
                    tensors = gptq.encode(packed, f"{prefix}.{local}")
                    for name, tensor in tensors.items():
                        writer.add(f"{prefix}.{local}.{name}", tensor)
                    digests[f"{prefix}.{local}"] = LinearDigest.of(packed)
                    report = next(r for r in finished.reports if r.name == f"{prefix}.{local}")
                    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
                    reports.append(replace(report, num_bytes=num_bytes))
                for name in (n for n in kept if n.startswith(prefix + ".")):
                    tensor = finished.changed.get(name.removeprefix(prefix + "."))
                    if tensor is not None:
                        rewritten[name] = tensor_digest(tensor)
                    writer.add(name, reader.get(name) if tensor is None else tensor)
            kept = [name for name in kept if not name.startswith(prefix + ".")]
            _log_layer(prefix, finished.reports)
        for name, tensor in model_tensors.items():
            rewritten[name] = tensor_digest(tensor)
        for name in dict.fromkeys([*kept, *model_tensors]):  # embeddings, last norm, head
            writer.add(name, model_tensors[name] if name in model_tensors else reader.get(name))

        with clock("perplexity"):
            perplexity = _compare(reader, layer_map, model_tensors, stream, eval_text)
        config = {**reader.config, **_config_changes(layer_map, model_tensors)}
        staged = writer.seal({**config, BLOCK: block}, side_files_from=reader.folder)
        writer.write_json(QUANTIZE_CONFIG, block)
        with clock("reading back"):
            bar.set_description("reading back")
            verify(staged, digests, reader, rewritten, config)
        report = QuantizationReport(
            source=str(source),
            source_sha256=identity["model"],
            scheme=str(scheme),
            recipe=recipe.name,
            format=output_format,
            linears=tuple(reports),
            bytes_before=sum(entry.num_bytes for entry in reader.entries.values()),
            bytes_after=sum(e.num_bytes for e in CheckpointReader(staged).entries.values()),
            calibration=identity["calibration"],
            perplexity=perplexity,
            seconds_by_stage=clock.seconds,
            warnings=_warnings(data, layer_map, model_tensors, reader),
            versions={"quantizer": quantizer, **tool_versions()},
            seconds=time.perf_counter() - clock.began,
        )
        writer.write_json(REPORT, report.to_dict())
        (staged / REPORT_HTML).write_text(to_html(report), encoding="utf-8")
        writer.publish()
        journal.remove()
    return report


@dataclass(slots=True)
class _Clock:
    """Seconds by stage; each is added to by `with clock("stage"):`."""

    began: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        elapsed = time.perf_counter() - started
        self.seconds[stage] = self.seconds.get(stage, 0.0) + elapsed


def _show(bar: tqdm, layer: str, what: str, advance: int = 1) -> None:
    bar.set_description(f"{layer} {what}")
    bar.update(advance)


def _log_layer(prefix: str, reports: tuple[LinearReport, ...]) -> None:
    worst = max(reports, key=lambda r: r.output_error or r.relative_error)
    kind = "weight" if worst.output_error is None else "output"
    error = 100 * (worst.output_error or worst.relative_error)
    log.info("%s: largest %s error %.2f %%, of %s", prefix, kind, error, worst.name)
    for report in reports:
        for note in report.notes:
            log.warning("%s: %s", report.name, note)


def _read_data(
    reader: CheckpointReader,
    recipe: Recipe,
    calibration: str | CalibrationData | None,
    samples: int,
    sequence_length: int,
    seed: int,
) -> CalibrationData | None:
    if calibration is None and not recipe.needs_data:
        return None
    if isinstance(calibration, CalibrationData):
        return calibration
    data = read_calibration(
        calibration,
        _tokenizer(reader),
        samples=samples,
        sequence_length=min(sequence_length, _longest(reader)),
        seed=seed,
    )
    for warning in data.warnings:
        log.warning("%s", warning)
    return data


def _read_evaluation(reader: CheckpointReader, eval_text: str | None) -> torch.Tensor | None:
    if eval_text is None:
        return None
    tokenizer = _tokenizer(reader)
    return make_windows(
        read_texts(eval_text),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.bos_token_id,
        min(EVAL_LENGTH, _longest(reader)),
        EVAL_WINDOWS,
    )


def _longest(reader: CheckpointReader) -> int:
    return reader.config.get("max_position_embeddings") or DEFAULT_LENGTH


def _tokenizer(reader: CheckpointReader) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(reader.folder)
    except Exception as error:  # transformers raises what its many tokenizer classes raise
        raise InputError(
            str(reader.folder), f"its tokenizer cannot be loaded: {error}", "add tokenizer.json"
        ) from None


def _identity(
    reader: CheckpointReader,
    scheme: Scheme,
    recipe: Recipe,
    data: CalibrationData | None,
    seed: int,
    device: str,
) -> dict[str, Any]:
    """Everything that decides a layer's bytes. Two runs with the same one may share layers."""
    digest = hashlib.sha256(repr(sorted(reader.config.items(), key=str)).encode())
    for path in sorted({entry.file for entry in reader.entries.values()}):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    for entry in reader.entries.values():
        digest.update(f"{entry.name} {entry.dtype} {entry.shape}".encode())
    return {
        "model": digest.hexdigest(),
        "modified": {
            path.name: path.stat().st_mtime_ns
            for path in sorted({entry.file for entry in reader.entries.values()})
        },
        "scheme": str(scheme),
        "recipe": recipe.name,
        "calibration": data
        and {
            "source": data.source,
            "sha256": data.sha256,
            "windows": data.ids_WS.shape[0],
            "sequence_length": data.ids_WS.shape[1],
            "seed": data.seed,
        },
        "seed": seed,
        "device": device,
        "versions": tool_versions(),
    }


def _read_layer(
    reader: CheckpointReader, layer_map: LayerMap, layer: int, device: str
) -> LayerState:
    prefix = layer_map.prefix(layer)
    state = {local: reader.get(f"{prefix}.{local}", device) for local in reader.children(prefix)}
    names = [n for group in layer_map.inputs(reader.config) for n in group]
    check_weights(state, [*(f"{n}.weight" for n in names), *layer_map.layer_tensors], prefix)
    return state


def _rewrite_model(
    reader: CheckpointReader, layer_map: LayerMap, recipe: Recipe, context: LayerContext
) -> LayerState:
    """Embeddings, last norm and head where a transform changes them; else empty."""
    transforms = [t.on_model for t in recipe.transforms if t.on_model is not None]
    if not transforms:
        return {}
    tensors = {
        layer_map.embedding: reader.get(layer_map.embedding),
        layer_map.last_norm: reader.get(layer_map.last_norm),
        layer_map.head: _head(reader, layer_map),
    }
    check_weights(tensors, list(tensors), str(reader.folder))
    for rewrite in transforms:
        tensors |= rewrite(tensors, context)
    return tensors


def _head(reader: CheckpointReader, layer_map: LayerMap) -> torch.Tensor:
    return reader.get(layer_map.embedding if layer_map.tied_head(reader.config) else layer_map.head)


def _open_stream(
    reader: CheckpointReader,
    layer_map: LayerMap,
    recipe: Recipe,
    model_tensors: LayerState,
    data: CalibrationData | None,
    evaluation_WS: torch.Tensor | None,
    activation_bits: int | None,
    spill: str | Path | None,
    device: str,
) -> Any:
    # transformers is loaded only where a model runs
    from calibrate.capture import LayerRunner
    from calibrate.stream import Stream

    embedding = reader.get(layer_map.embedding)
    if spill is not None:
        Path(spill).mkdir(parents=True, exist_ok=True)
    return Stream(
        LayerRunner(reader, layer_map, device),
        embedding,
        model_tensors.get(layer_map.embedding, embedding),
        calibration_WS=data.ids_WS if data else None,
        evaluation_WS=evaluation_WS,
        with_reference=recipe.corrects,
        activation=activation_bits and partial(fake_quantize_tokens, bits=activation_bits),
        spill=Path(spill) if spill else None,
    )


def _compare(
    reader: CheckpointReader,
    layer_map: LayerMap,
    model_tensors: LayerState,
    stream: Any,
    eval_text: str | None,
) -> dict[str, Any] | None:
    if stream is None or eval_text is None:
        return None
    original = (reader.get(layer_map.last_norm), _head(reader, layer_map))
    changed = original
    if model_tensors:
        changed = (model_tensors[layer_map.last_norm], model_tensors[layer_map.head])
    before, after = stream.perplexities(original, changed)
    return {
        "text": eval_text,
        "before": before.value,
        "after": after.value,
        "windows": before.windows,
        "sequence_length": stream.evaluation_WS.shape[1],
    }


def _config_changes(layer_map: LayerMap, model_tensors: LayerState) -> dict[str, Any]:
    return {"tie_word_embeddings": False} if layer_map.head in model_tensors else {}


def _warnings(
    data: CalibrationData | None,
    layer_map: LayerMap,
    model_tensors: LayerState,
    reader: CheckpointReader,
) -> tuple[str, ...]:
    warnings = list(data.warnings) if data else []
    if layer_map.head in model_tensors and layer_map.tied_head(reader.config):
        warnings.append(
            "embedding and head were one matrix; the rotation makes them two: lm_head.weight is"
            " written, tie_word_embeddings is false"
        )
    return tuple(warnings)


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
        for name in layer_map.linear_names(layer, reader.config):
            entry = reader.entries[f"{name}.weight"]
            if entry.dtype not in FLOAT_DTYPES or len(entry.shape) != 2:
                raise CheckpointError(
                    f"{name}.weight",
                    f"expected a float matrix, found {entry.dtype} {list(entry.shape)}",
                    "start from the float model",
                )
            scheme.weight.check_shape(name, *entry.shape)
