"""Choose GPTAQ's correction factor with calibration texts only: some calibrate, others evaluate.

    python examples/search_correction.py MODEL... --texts calibration.jsonl --device cuda

Every fourth text is left out of calibration. Perplexity is measured on these texts, or on the text
of --judge. Do not use a text on which final figures are measured. Models compute in float32.
"""

import argparse
import json
import random
import tempfile
from functools import partial
from pathlib import Path

import torch

from calibrate.pipeline import quantize_checkpoint
from calibrate.recipe import Recipe
from calibrate.solvers import gptq
from calibrate.texts.documents import read_texts
from formats.checkpoint import CheckpointReader, CheckpointWriter
from formats.scheme import Scheme

JUDGES = 4  # every fourth text judges


def split(texts: list[str], seed: int) -> tuple[list[str], list[str]]:
    """Return (calibration texts, evaluation texts), shuffled by the seed."""
    texts = random.Random(seed).sample(texts, len(texts))
    return [t for i, t in enumerate(texts) if i % JUDGES], texts[::JUDGES]


def write_texts(path: Path, texts: list[str]) -> str:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return str(path)


def in_float32(model: str, folder: Path) -> Path:
    """Return a copy of the model whose layers run in float32 on a GPU, too."""
    reader = CheckpointReader(model)
    with CheckpointWriter(folder) as writer:
        for name in reader.entries:
            writer.add(name, reader.get(name).to(torch.float32))
        writer.seal(reader.config, side_files_from=reader.folder)
        writer.publish()
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--texts", required=True)
    parser.add_argument("--judge", help="text file to judge by, instead of every fourth text")
    parser.add_argument("--shares", type=float, nargs="+", default=[0, 0.25, 0.5, 0.75, 1])
    parser.add_argument("--schemes", nargs="+", default=["w4a16-sym"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    texts = read_texts(arguments.texts)
    with tempfile.TemporaryDirectory() as name:
        work, number = Path(name), 0
        for model in arguments.models:
            source = in_float32(model, work / Path(model).name)
            for scheme, seed in [(s, n) for s in arguments.schemes for n in arguments.seeds]:
                calibrating, judging = split(texts, seed)
                calibration = write_texts(work / "calibration.jsonl", calibrating)
                judges = arguments.judge or write_texts(work / "judges.jsonl", judging)
                for share in arguments.shares:
                    number += 1
                    solver = partial(gptq.solve_corrected, share=share)
                    report = quantize_checkpoint(
                        source,
                        work / str(number),
                        scheme=Scheme.parse(scheme),
                        recipe=Recipe(name=f"gptaq-{share}", solver=solver, corrects=True),
                        calibration=calibration,
                        samples=arguments.samples,
                        sequence_length=arguments.sequence_length,
                        seed=seed,
                        eval_text=judges,
                        device=arguments.device,
                        progress=False,
                    )
                    before, after = (report.quality[k] for k in ("float_perplexity", "perplexity"))
                    print(
                        f"{Path(model).name} {scheme} seed {seed} share {share:4}:"
                        f" {before:.3f} -> {after:.3f}, {report.seconds:.1f} s",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
