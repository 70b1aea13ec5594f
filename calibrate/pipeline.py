"""Quantize a float model folder into a quantized one, one decoder layer at a time.

Memory holds one layer, the hidden states of the calibration data and the shard being filled,
whatever the model's size. An interrupted run resumes.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from calibrate.clock import Clock
from calibrate.recipe import Recipe
from calibrate.results.output import Output
from calibrate.results.report import QuantizationReport
from calibrate.results.verify import kept_tensors
from calibrate.resume.journal import Journal
from calibrate.run.finish import finish
from calibrate.run.layers import advance, solve_layers
from calibrate.run.prepare import prepare, rewrite_model
from calibrate.run.settings import RunSettings
from calibrate.texts.data import DEFAULT_LENGTH, DEFAULT_SAMPLES, CalibrationData
from calibrate.texts.image_windows import ChatReader
from formats.checkpoint import DEFAULT_MAX_SHARD_BYTES
from formats.files.model_writer import min_bytes, open_writer
from formats.names import FormatName, RecipeName, SchemeName
from formats.numerics.torch_state import torch_defaults
from formats.scheme import Scheme


@torch_defaults()
def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    scheme: SchemeName | str | Scheme,
    recipe: RecipeName | str | Recipe = "rtn",
    output_format: FormatName | str | None = None,
    ignore: Sequence[str] = (),
    overrides: Iterable[tuple[str, SchemeName | str | Scheme]] = (),
    bits: float | None = None,
    pad: bool = False,
    fit_groups: bool | None = False,
    input_scales: Mapping[str, torch.Tensor | float] | None = None,
    quantize_head: SchemeName | str | Scheme | None = None,
    quantize_embedding: SchemeName | str | Scheme | None = None,
    kv_cache: str | None = None,
    kv_per_head: bool = False,
    act_order: bool = False,
    moe_calibrate_all_experts: bool = False,
    adapter: str | Path | None = None,
    calibration: str | CalibrationData | None = None,
    samples: int = DEFAULT_SAMPLES,
    sequence_length: int = DEFAULT_LENGTH,
    seed: int = 0,
    bos: bool = True,
    eval_text: str | None = None,
    quality_windows: int = 0,
    spill: str | Path | None = None,
    device: str | Sequence[str] = "cpu",
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    progress: bool = True,
    quantizer: str = "qserve-kit",
    settings: Mapping[str, Any] | None = None,
    chats: ChatReader | None = None,
) -> QuantizationReport:
    """Quantize every linear of every decoder layer of `source` and write `target`.

    `source` and `adapter` are folders or hub names: ORG/NAME, ORG/NAME@REVISION.

    Tensors that are not quantized are copied bit for bit, unless a transform of the recipe is
    folded into them. `target` appears only when it is complete and has been read back.

    `recipe` is a name in RECIPES, or a Recipe of your own. An unfinished run with your own Recipe
    resumes only if the Recipe has the same `version`. "rtn" needs no data.

    `output_format` None: the scheme's default. `ignore`, `overrides` and `pad`: see formats/plan.py
    and formats/architecture/padding.py.

    `bits`: mean bits per weight. Each linear gets 2 to 8 bits according to its sensitivity
    (calibrate/mixed_bits.py); `scheme` then sets group size and symmetry. `fit_groups` True
    replaces the scheme's group size by the largest of 128, 64 and 32 that divides every linear;
    None: as True, but only if the scheme's size would leave over a tenth of the weights in float.

    `quantize_head` and `quantize_embedding`: schemes of these matrices; None: they stay in float
    (calibrate/head_and_embedding.py).

    `kv_cache` ("int8" or "fp8") writes scales for such a KV cache, one per layer, or one per KV
    head with `kv_per_head`. `act_order`: group inputs of similar magnitude; the file then has a
    group index that only some programs support.

    `moe_calibrate_all_experts`: collect statistics of every token at every expert; the layer's
    output is still that of the routed experts. `adapter`: a PEFT folder with a LoRA adapter that is
    applied during calibration. `input_scales`: scales of static activations by linear, instead of
    scales from the data.

    `calibration` is a file, a data set's name, or windows of token ids; None: the texts of the
    package, if data is needed. `chats` reads chats with images, as qserve/multimodal/calibration.py
    does; None: chats with images are refused. `bos`: begin every window as the tokenizer begins a
    text. `spill`: a folder that holds the data's hidden states, to save memory. Quality is measured
    on `eval_text`, or else on `quality_windows` windows of the package's held-out texts
    (quality/card.py).

    With several devices in `device`, or "all" GPUs, the devices divide the windows and a layer's
    linears (calibrate/devices.py); a solver of your own must then be thread-safe. `quantizer`
    ("tool:version") and `settings` are recorded in the result.

    Raises InputError for anything that the user can fix, if possible before the first weight is
    read; then no file remains.
    """
    run = prepare(
        RunSettings(
            source=source,
            target=target,
            scheme=Scheme.parse(scheme),
            recipe=recipe,
            output_format=output_format,
            ignore=ignore,
            overrides=[(pattern, Scheme.parse(own)) for pattern, own in overrides],
            bits=bits,
            pad=pad,
            fit_groups=fit_groups,
            quantize_head=_parsed(quantize_head),
            quantize_embedding=_parsed(quantize_embedding),
            kv_cache=kv_cache,
            kv_per_head=kv_per_head,
            act_order=act_order,
            moe_calibrate_all_experts=moe_calibrate_all_experts,
            adapter=adapter,
            calibration=calibration,
            samples=samples,
            sequence_length=sequence_length,
            seed=seed,
            bos=bos,
            eval_text=eval_text,
            quality_windows=quality_windows,
            spill=spill,
            device=device,
            quantizer=quantizer,
            recorded=settings,
            chats=chats,
            input_scales=input_scales or {},
        ),
        Clock(),
    )
    model, schemes = run.model, run.schemes
    least = min_bytes(model.reader, schemes)
    with (
        open_writer(
            target, model.reader, min_bytes=least, max_shard_bytes=max_shard_bytes
        ) as writer,
        Journal(target, run.identity) as journal,
        tqdm(total=len(schemes), unit="linear", disable=not progress) as bar,
    ):
        model_tensors = rewrite_model(model, run.recipe, run.context)
        run.head_and_embedding.solve_embedding(model, model_tensors)
        stream = run.open_stream(model_tensors)
        output = Output(writer=writer, layout=run.plan.layout, kept=kept_tensors(model, schemes))
        solve_layers(run, stream, output, journal, bar)
        journal.all_solved = True
        with run.clock("solving"):
            run.head_and_embedding.solve_head(
                model, model_tensors, stream, run.recipe, run.devices.first
            )
        for name, (packed, linear) in run.head_and_embedding.solved.items():
            advance(bar, "outside of layers", name)
            output.add_linear(name, packed, linear)
        output.add_rest(
            run.head_and_embedding.without(model_tensors), model
        )  # last norm; embedding and head
        bar.set_description("measuring and reading back")
        report = finish(run, model_tensors, stream, output, writer)
        journal.remove()
    return report


def _parsed(scheme: str | Scheme | None) -> Scheme | None:
    return None if scheme is None else Scheme.parse(scheme)
