"""FloatModel: the folder of a float model, checked once and then read layer by layer.

The weights of a quantized folder are dequantized when they are read.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from calibrate.digest import combined, tensor_digest, tensors_digest
from calibrate.layer_map import find_layer_map
from calibrate.solvers.solving import LayerState
from formats.architecture.next_token import draft_linears
from formats.architecture.padding import Padding
from formats.architecture.variant_check import check_counts
from formats.checkpoint import CheckpointReader, TensorEntry
from formats.errors import COPY_CONFIG, DOWNLOAD_BOTH, CheckpointError, InputError, one_line
from formats.inspection.config import check_config
from formats.inspection.findings import Findings
from formats.inspection.model import check_shapes
from formats.numerics import finite
from formats.peft.lora import LoraAdapter
from formats.quant_config import BLOCK
from formats.scheme import Scheme

log = logging.getLogger(__name__)

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_NAMES_SHOWN = 8


class FloatModel:
    """Float model to quantize, read lazily. `padding`, if set, widens tensors and the config."""

    def __init__(self, folder: str | Path) -> None:
        """Check config and file headers, so that a run does not fail late.

        Raises InputError unless the folder is a complete float model of a known architecture.
        """
        self.reader = CheckpointReader(folder, as_floats=True, rounded=True)
        check_counts(self.reader.config)
        self._check_config()
        self.layer_map = find_layer_map(self.reader.config)
        self.padding: Padding | None = None
        self.adapter: LoraAdapter | None = None  # applied during calibration, if set
        self.num_layers = self.layer_map.num_layers(self.reader.config)
        self._check_not_quantized()
        self._check_complete()
        self._check_shapes()
        self.shapes = self._check_linears()  # [N, K] of every linear, by name
        self.layer_digests: dict[int, str] = {}  # by layer; filled by layer()

    @property
    def folder(self) -> Path:
        return self.reader.folder

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Header entries of all tensors as stored, without padding."""
        return self.reader.entries

    @property
    def draft_linears(self) -> dict[str, tuple[int, int]]:
        """[N, K] of the linears of draft layers (MTP), by name; they are copied unchanged."""
        return draft_linears(self.reader.config, self.entries)

    @property
    def config(self) -> dict[str, Any]:
        changes = self.padding.config_changes if self.padding else {}
        return {**self.reader.config, **changes}

    @property
    def num_positions(self) -> int | None:
        """`max_position_embeddings` of config.json, or None."""
        return self.reader.config.get("max_position_embeddings")

    def get(self, name: str, device: str = "cpu") -> torch.Tensor:
        """Return one tensor, padded. Raises CheckpointError if it does not exist.

        A norm without weights is returned as ones.
        """
        family = self.layer_map.family
        if not family.norm_weights and name in (family.last_norm, family.embedding_norm):
            return torch.ones(self.config["hidden_size"], device=device)
        tensor = self.reader.get(name, device)
        return self.padding.apply(name, tensor) if self.padding else tensor

    def layer(self, number: int, device: str) -> LayerState:
        """Return a layer's tensors by local name, and record their digest.

        Raises CheckpointError if a required tensor has NaN or infinity.
        """
        prefix = self.layer_map.prefix(number)
        state = {local: self.get(f"{prefix}.{local}") for local in self.reader.children(prefix)}
        self.layer_digests[number] = tensors_digest(state)
        state = {local: tensor.to(device) for local, tensor in state.items()}
        names = [n for group in self.layer_map.inputs(self.config, number) for n in group]
        required = self.layer_map.required_in_layer(self.config, number)
        check_finite(state, [*(f"{n}.weight" for n in names), *required], prefix)
        return state

    def outer_digest(self) -> str:
        """Read all tensors outside of the layers and return their digest."""
        layers = tuple(f"{self.layer_map.prefix(i)}." for i in range(self.num_layers))
        names = [name for name in self.entries if not name.startswith(layers)]
        return combined(f"{name} {tensor_digest(self.get(name))}" for name in sorted(names))

    def head(self) -> torch.Tensor:
        """Return the output head [V, D], which is the embedding if it is tied."""
        tied = self.layer_map.tied_head(self.config)
        return self.get(self.layer_map.embedding if tied else self.layer_map.head)

    def tokenizer(self) -> Any:
        """Load the folder's tokenizer with transformers, without remote code. Raises InputError."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                self.folder, trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # transformers raises any exception of its tokenizer classes
            raise InputError(
                str(self.folder),
                f"the tokenizer cannot be loaded: {one_line(error)}",
                "add tokenizer.json",
            ) from None

    def check_keys_are_kept(self) -> None:
        """Raise InputError for latent or compressed attention, which needs no calibrated scales."""
        family = self.layer_map.family
        if family.kind_tensors:
            raise InputError(
                "`kv_cache`",
                f"does not work with {family.architecture}: its cache has 16 bits or more",
                "quantize without it",
            )
        if family.latent:
            raise InputError(
                "`kv_cache`",
                f"does not work with {family.architecture}: latents in 8 bits get their scales"
                " when they are written",
                "quantize without it",
            )

    def _check_config(self) -> None:
        """Raise CheckpointError for config values with which the layers cannot run."""
        findings = Findings()
        check_config(self.reader.config, findings)
        for problem in findings.problems:
            if problem.severity == "error":
                raise CheckpointError(problem.subject, problem.text, COPY_CONFIG)

    def _check_not_quantized(self) -> None:
        quantized = [name for name in self.entries if name.endswith(".qweight")]
        if quantized:
            raise CheckpointError(
                str(self.folder),
                f"has {quantized[0]}, but its config.json has no {BLOCK}",
                "restore the key, or start from the float model",
            )

    def check_gains(self, targets: Iterable[Scheme]) -> None:
        """Raise InputError for a quantized source unless a target has fewer bits; warn otherwise.

        Integers of as many bits would be rounded a second time, which gains nothing.
        """
        if not self.reader.decoded:
            return
        weights = [scheme.weight for scheme in self.reader.decoded.values()]
        stated = ", ".join(dict.fromkeys(str(each) for each in self.reader.decoded.values()))
        most = max(each.bits for each in weights)
        if all(each.type == "int" for each in weights) and all(
            target.weight.bits >= most for target in targets
        ):
            raise InputError(
                str(self.folder),
                f"is quantized already ({stated}), in as few bits as requested",
                "use `qserve convert` for another format, or start from the float model",
            )
        log.warning(
            "%s is quantized (%s): its errors stay, and those of quantizing it again are added;"
            " use the float model if there is one",
            self.folder,
            stated,
        )

    def _check_complete(self) -> None:
        required = self.layer_map.required_tensors(self.reader.config)
        missing = [name for name in required if name not in self.entries]
        if missing:
            more = f" and {len(missing) - MAX_NAMES_SHOWN} more" * (len(missing) > MAX_NAMES_SHOWN)
            raise CheckpointError(
                str(self.folder),
                f"tensors missing: {', '.join(missing[:MAX_NAMES_SHOWN])}{more}",
                DOWNLOAD_BOTH,
            )

    def _check_shapes(self) -> None:
        """Compare shapes with config.json, for families with known shapes."""
        findings = Findings()
        check_shapes(self.reader.config, (), self.reader, findings)
        for problem in findings.problems:
            raise CheckpointError(problem.subject, problem.text, problem.remedy or COPY_CONFIG)

    def _check_linears(self) -> dict[str, tuple[int, int]]:
        shapes = {}
        for layer in range(self.num_layers):
            for name in self.layer_map.linear_names(layer, self.reader.config):
                entry = self.entries[f"{name}.weight"]
                if entry.dtype not in FLOAT_DTYPES or len(entry.shape) != 2:
                    raise CheckpointError(
                        f"{name}.weight",
                        f"expected a float matrix, found {entry.dtype} {list(entry.shape)}",
                        "start from the float model",
                    )
                shapes[name] = entry.shape
        return shapes


def check_finite(state: LayerState, names: list[str], prefix: str) -> None:
    """Raise CheckpointError, naming the tensor, if one of `names` has a NaN or infinity."""
    for name in names:
        if name in state:
            finite.check_finite(f"{prefix}.{name}", state[name])
