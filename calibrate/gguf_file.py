"""Quantize a float model into a GGUF file: solvers choose the codes, blocks hold them unchanged."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from calibrate.pipeline import quantize_checkpoint
from calibrate.results.report import QuantizationReport
from formats.gguf.writing.container_writer import check_file_is_free
from formats.gguf.writing.export import check_exports, export_gguf
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme

EMBEDDING_TYPE = "Q8_0"  # of the embedding and of a float head, as in other tools' files


def quantize_to_gguf(
    source: str | Path, target: str | Path, *, scheme: Scheme, **settings: Any
) -> QuantizationReport:
    """Quantize `source` with the arguments of quantize_checkpoint and write one GGUF file.

    A folder next to the file holds the quantized checkpoint until the file is complete. Minima of
    asymmetric blocks are rounded to float16.

    Raises InputError, before the model is read, for what GGUF does not hold.
    """
    target = check_file_is_free(target)
    check_exports(source, scheme)
    folder = target.with_name(f".{target.name}.quantized")
    settings["output_format"] = "compressed-tensors"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that ended while it wrote the file
    try:
        report = quantize_checkpoint(source, folder, scheme=scheme, **settings)
        written = export_gguf(folder, target, embedding_type=EMBEDDING_TYPE, exact=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    verdicts = {each.program: each[1:] for each in inspect_checkpoint(target).loads_in}
    return replace(report, format="gguf", bytes_after=written.num_bytes, loads_in=verdicts)
