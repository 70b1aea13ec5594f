"""`qserve distill`: train a quantized checkpoint to match the float model's predictions.

Scales and norm weights are trained, and codes if their rate is not 0. The format and all other
tensors stay the same bit for bit.
"""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from calibrate.calibration.layer_runner import LayerRunner
from calibrate.calibration.vision import open_media
from calibrate.clock import Clock
from calibrate.devices import Devices
from calibrate.distillation.float_weights import FloatWeights
from calibrate.distillation.student import Student
from calibrate.distillation.training import Comparison, Teacher, Trained, Training, TrainingSettings
from calibrate.float_model import FloatModel
from calibrate.quality.agreement import AgreementSum
from calibrate.quality.card import command_line
from calibrate.quality.evaluation import Evaluation, read_evaluation
from calibrate.results.model_card import CARD
from calibrate.results.report import public_data, public_name, tool_versions
from calibrate.texts.data import (
    DEFAULT_LENGTH,
    DEFAULT_SAMPLES,
    CalibrationData,
    read_for_model,
)
from calibrate.texts.image_windows import ChatReader
from formats.checkpoint import (
    DEFAULT_MAX_SHARD_BYTES,
    CheckpointReader,
    read_json,
)
from formats.errors import CheckpointError, InputError
from formats.files.channel_factors import read_channel_factors
from formats.files.model_path import is_gguf_folder
from formats.files.model_writer import open_writer
from formats.files.side_files import find_side_files
from formats.files.target import check_has_space, check_is_free
from formats.hub.fetch import local_path
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import same_weight
from formats.layouts import decode_linear, layout_of
from formats.numerics.torch_state import torch_defaults
from formats.quality.checksums import checksums
from formats.quality.probe import NUM_TOKENS, Probe
from formats.quality.record import QUALITY, VERSION, measured_text, read_quality

# keys of config.json that the checkpoint and its float model have in common -> noun
COMPARED = {"vocab_size": "tokens", "num_hidden_layers": "layers", "hidden_size": "channels"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """Result of a distillation."""

    source: str
    target: str
    trained: Trained
    quality_before: dict[str, Any] | None  # on evaluation texts, which are not trained on
    quality: dict[str, Any] | None
    num_linears: int
    seconds: float

    def to_text(self) -> str:
        lines = [
            f"KL divergence on held-out windows of the data: {self.trained.before:.5f} ->"
            f" {self.trained.after:.5f} nats a token (after step {self.trained.kept_step})"
        ]
        if self.quality_before and self.quality:
            lines.append(f"before: {measured_text(self.quality_before)}")
            lines.append(f"after:  {measured_text(self.quality)}")
        lines.append(f"trained the scales of {self.num_linears} linears in {self.seconds:.0f} s")
        return "\n".join(lines)


@torch_defaults()
def distill_checkpoint(
    source: str | Path,
    reference: str | Path,
    target: str | Path,
    *,
    calibration: str | CalibrationData | None = None,
    samples: int = DEFAULT_SAMPLES,
    sequence_length: int = DEFAULT_LENGTH,
    settings: TrainingSettings | None = None,
    seed: int = 0,
    bos: bool = True,
    eval_text: str | None = None,
    quality_windows: int = 4,
    device: str = "cpu",
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    progress: bool = True,
    quantizer: str = "qserve-kit",
    flags: Mapping[str, Any] | None = None,
    chats: ChatReader | None = None,
) -> Distillation:
    """Train the scales of `source`'s integer weights to match the float model `reference`.

    `source` is a quantized folder with integer codes, written by any tool; `reference` is the float
    model that it was made from. Both may be hub names. `target` appears only when it is complete.
    It equals `source` except for scales, norm weights, quality.json, the model card, and codes if
    the settings train them. One window in eight is held out, and the state with the least
    divergence on these windows is written; at worst that is `source` itself. An interrupt (Ctrl-C)
    during the training ends it early and writes the best state so far, if one is better than
    `source`. Parameters of the data mean the same as in quantize_checkpoint. `flags`: settings of
    the command line, to be recorded.

    Memory holds the codes in 8 bits, the hidden states of all windows and one layer's activations.
    Raises InputError for anything that the user can fix, if possible before the training.
    """
    clock = Clock()
    check_is_free(target)
    source, reference = local_path(source), local_path(reference)
    model = FloatModel(reference)
    if model.reader.decoded:
        raise InputError(str(reference), "is quantized", "give the float model")
    reader = CheckpointReader(source, rounded=True, in_blocks=False)
    if is_gguf_folder(reader.folder):
        raise InputError(str(source), "is a GGUF file", "distill a folder, then convert it")
    find_side_files(reader.folder)  # raises now, not after the work
    check_has_space(target, reader.num_bytes)
    _check_pair(reader, model)
    device = _only(device)
    data = read_for_model(model, calibration, samples, sequence_length, seed, bos, chats)
    if len(data.ids_WS) < 2:
        raise InputError(
            "calibration data", "has only one window, but one more must be held out", "add texts"
        )
    evaluation = read_evaluation(model, eval_text, quality_windows, bos)
    settings = settings or TrainingSettings()
    dtype = LayerRunner(model, model.layer_map, device).dtype
    media, rotary = open_media(model, data, device, dtype)
    original = None
    if settings.code_rate:
        stored = read_quality(reader.folder)
        quality = None if stored is None else stored.values
        original = FloatWeights(model, quality, read_channel_factors(reader.folder))
    student = Student(reader, device, copy.deepcopy(rotary), original)
    teacher = Teacher(model, device, rotary)
    judge = None
    with clock("float model"):
        windows = [data.ids_WS] if evaluation is None else [data.ids_WS, evaluation.ids_WS]
        taught, *judged = teacher.last_states(*windows, media=media)
    training = Training(student, teacher, data.ids_WS, taught, media)
    if evaluation is not None:
        own = Comparison(student, teacher, evaluation.ids_WS, *judged)
        judge = _EvaluationComparison(comparison=own, evaluation=evaluation)
    before = judge and judge.record()
    with clock("training"):
        trained = training.run(settings, seed, progress)
    linears, norms = student.finish()
    after = judge and judge.record()
    with clock("writing"):
        _write(
            student,
            linears,
            norms,
            target,
            {
                "measured": after,
                "command": flags
                and command_line(public_name(source), target, flags, command="distill"),
                "evaluate": f"qserve eval {Path(target).name} --against"
                f" {public_name(reference)} --text TEXT",
                "distillation": {
                    "reference": public_name(reference),
                    "settings": asdict(settings),
                    "calibration": public_data(data.facts()),
                    "held_out_divergence": asdict(trained),
                    "measured_before": before,
                },
                "versions": {"quantizer": quantizer, **tool_versions()},
                "probe": judge and judge.probe().to_dict(),
            },
            max_shard_bytes,
        )
    return Distillation(
        source=str(source),
        target=str(target),
        trained=trained,
        quality_before=before,
        quality=after,
        num_linears=sum(len(layer.linears) for layer in student.layers),
        seconds=clock.total,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EvaluationComparison:
    """Compares the student with the float model on the evaluation windows."""

    comparison: Comparison
    evaluation: Evaluation

    def record(self) -> dict[str, Any]:
        total = AgreementSum()
        for window, ids_S in enumerate(self.evaluation.ids_WS):
            total.add(ids_S, *self.comparison.logits(window), self.evaluation.given)
        return self.evaluation.record(total.result())

    def probe(self) -> Probe:
        _, logits_SV = self.comparison.logits(0)
        exact = logits_SV.dtype == torch.float32
        return Probe.of(self.evaluation.ids_WS[0], logits_SV[:NUM_TOKENS], exact=exact)


def _only(device: str) -> str:
    """Return the device. Raises InputError if there are several."""
    devices = Devices.parse(device)
    if len(devices.names) > 1:
        raise InputError(f"device {device!r}", "distillation runs on one device", "name one")
    return devices.first


def _check_pair(reader: CheckpointReader, model: FloatModel) -> None:
    """Raise InputError unless both models have the same numbers of tokens, layers and channels."""
    for key, noun in COMPARED.items():
        own, other = reader.config.get(key), model.config.get(key)
        if own != other:
            raise InputError(
                str(model.folder),
                f"has {other} {noun}, and {reader.folder} has {own}",
                "give the float model that the checkpoint was made from",
            )


def _write(
    student: Student,
    linears: Mapping[str, PackedWeight],
    norms: Mapping[str, torch.Tensor],
    target: str | Path,
    quality: Mapping[str, Any],
    max_shard_bytes: int,
) -> None:
    reader, config = student.reader, student.config
    layout = layout_of(config)
    changed = dict(norms)
    for module, weight in linears.items():
        changed |= _in_file(student, module, weight)
    with open_writer(
        target, reader, min_bytes=reader.num_bytes, max_shard_bytes=max_shard_bytes
    ) as writer:
        for name in reader.entries:
            writer.add(name, changed[name] if name in changed else reader.get(name))
        staged = writer.seal(dict(reader.config), side_files_from=reader.folder)
        second = layout.second_file
        if second is not None and (reader.folder / second).exists():
            writer.write_json(second, read_json(reader.folder / second))
        sums = checksums(CheckpointReader(staged), linears)
        stored = read_quality(reader.folder)
        values = {} if stored is None else stored.values
        record = {**values, **quality, "version": VERSION, "checksums": dict(sums)}
        writer.write_json(QUALITY, record)
        writer.write_text(CARD, _card(Path(target).name, record))
        writer.publish()


def _in_file(student: Student, module: str, new: PackedWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of a linear that change, by full name, as the file stores them.

    If only the scales changed, this is the tensor that holds them. It is found by its values, which
    works for every layout, and the result is decoded again and compared. If codes changed, these
    are all tensors of the linear.
    """
    config = student.config
    names, tensors = student.stored(module)
    old = decode_linear(module, tensors, config)
    if not torch.equal(old.words_NW, new.words_NW):
        return _encoded(student, module, new, names, tensors)
    for field, tensor in tensors.items():
        for turned in (False, True):
            stored_NG, new_NG = (
                each.scales_NG.t() if turned else each.scales_NG for each in (old, new)
            )
            if not tensor.is_floating_point() or tensor.numel() != stored_NG.numel():
                continue
            if torch.equal(stored_NG.reshape(tensor.shape).float(), tensor.float()):
                scales = new_NG.reshape(tensor.shape).to(tensor.dtype).contiguous()
                again = decode_linear(module, {**tensors, field: scales}, config)
                if same_weight(new, again) is None:
                    return {names[field]: scales}
    raise CheckpointError(
        module,
        "its scales are not stored as one tensor of floats",
        "convert the checkpoint first: qserve convert --format gptq",
    )


def _encoded(
    student: Student,
    module: str,
    new: PackedWeight,
    names: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return all tensors of a linear with new codes, by full name, in the file's layout."""
    found = layout_of(student.config).encode(new, module)
    again = {**tensors, **found}
    same_form = all(
        name in tensors
        and (tensor.shape, tensor.dtype) == (tensors[name].shape, tensors[name].dtype)
        for name, tensor in found.items()
    )
    if not same_form or same_weight(new, decode_linear(module, again, student.config)) is not None:
        raise CheckpointError(
            module,
            "codes are not written in its layout",
            "convert the checkpoint first: qserve convert --format gptq",
        )
    return {names[field]: tensor for field, tensor in found.items()}


def _card(name: str, record: Mapping[str, Any]) -> str:
    found = record["distillation"]
    trained = "Scales and norm weights"
    if found["settings"]["code_rate"]:
        trained = "Codes, scales and norm weights"
    lines = [
        f"# {name}",
        "",
        f"{trained} trained to predict as {found['reference']}.",
    ]
    if record["measured"]:
        lines += ["", f"Before: {measured_text(found['measured_before'])}."]
        lines += ["", f"After: {measured_text(record['measured'])}."]
    if record["command"]:
        lines += ["", f"    {record['command']}"]
    return "\n".join([*lines, "", f"`{QUALITY}` has the settings and the data.", ""])
