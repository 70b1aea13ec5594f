"""Write a checkpoint with random weights in a real model's size, to measure its loading time.

    python examples/write_dummy.py ./dummy-8b --shape llama-3-8b --scheme w4a16-sym
    python examples/measure_start.py --model ./dummy-8b
    python examples/write_dummy.py ./config-8b --config-only    # for --load-format dummy

The weights are the same as with `--load-format dummy`, encoded in the scheme's default format.
"""

import argparse
import json
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from bench_shapes import SHAPES, write_config
from safetensors.torch import save_file

from formats.layouts import LAYOUTS, encode_linear
from qserve.model.loading.dummy_source import DummySource
from qserve.model.loading.loader import load
from qserve.model.model_config import ModelConfig

SHARD_BYTES = 2**30
TOKENIZER = Path(__file__).parent / "models" / "docs-5m"


class WritingSource(DummySource):
    """Source of random weights that also writes them to a checkpoint."""

    def __init__(self, folder: Path, config: ModelConfig, device: torch.device) -> None:
        super().__init__(config, device, seed=0)
        self._folder = folder
        self._shard: dict[str, torch.Tensor] = {}
        self._map: dict[str, str] = {}
        self._num_shards = self._num_bytes = self._shard_bytes = 0

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        if rows is not None:
            raise NotImplementedError("rows of a tensor cannot be written alone")
        tensor = super().tensor(name, shape)
        self._add(name, tensor.to(torch.bfloat16))
        return tensor

    def weight(self, module: str, shape: tuple[int, int]):
        weight, scheme = super().weight(module, shape), self.quant.scheme_for(module)
        layout = LAYOUTS[self.quant.method]
        for name, tensor in encode_linear(weight, scheme, layout, module).items():
            self._add(f"{module}.{name}", tensor)
        return weight

    def audit(self, unread: tuple[str, ...] = (), without: Collection[str] = ()) -> None:
        """The last shard and the index."""
        self._write()
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": self._map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self._shard[name] = tensor.cpu().contiguous()
        self._shard_bytes += tensor.nbytes
        if self._shard_bytes >= SHARD_BYTES:
            self._write()

    def _write(self) -> None:
        if not self._shard:
            return
        self._num_shards += 1
        file = f"model-{self._num_shards:05d}.safetensors"
        save_file(self._shard, self._folder / file, metadata={"format": "pt"})
        self._map |= dict.fromkeys(self._shard, file)
        self._num_bytes += self._shard_bytes
        self._shard, self._shard_bytes = {}, 0


def write(folder: Path, shape: str, scheme: str | None, *, config_only: bool = False) -> None:
    """Write a model folder, or its files without weights. `scheme` None: bfloat16."""
    folder.mkdir(parents=True)
    write_config(folder, shape, scheme)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    if config_only:
        return
    config = ModelConfig.from_folder(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = WritingSource(folder, config, device)
    load(config, source, device=device, dtype=torch.bfloat16, max_model_len=1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--scheme", default="w4a16-sym", help="or w8a8, or bf16")
    parser.add_argument("--config-only", action="store_true", help="no weights")
    arguments = parser.parse_args()
    scheme = None if arguments.scheme == "bf16" else arguments.scheme
    write(arguments.folder, arguments.shape, scheme, config_only=arguments.config_only)


if __name__ == "__main__":
    main()
