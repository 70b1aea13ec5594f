"""Quantize the output head and the input embedding, if requested; by default they stay in float.

The embedding is rounded first, so that the layers are calibrated on its rounded rows. The head is
solved last, on its own inputs: the last norm's outputs in the quantized model. If a tied head is
quantized alone, it is written next to the float embedding and the two are no longer tied. If a tied
embedding is quantized, the head uses the same codes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from calibrate.float_model import FloatModel, check_finite
from calibrate.layer import solve_linear
from calibrate.recipe import Recipe
from calibrate.results.report import LinearReport
from calibrate.solvers import rtn
from calibrate.solvers.solving import LayerState
from formats.codecs.config_fields import EMBEDDING
from formats.errors import InputError
from formats.in_memory.weights import Weight
from formats.plan import Plan
from formats.quant_config import HEAD
from formats.scheme import NO_WHOLE_GROUPS, Scheme

if TYPE_CHECKING:  # it loads transformers
    from calibrate.calibration.stream import Stream

FLAGS = {HEAD: "`quantize_head`", EMBEDDING: "`quantize_embedding`"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAndEmbedding:
    """Schemes of head and embedding in a run, and their codes after they are solved."""

    schemes: dict[str, Scheme]  # module -> its scheme; empty: both stay in float
    shapes: dict[str, tuple[int, int]]  # [V, D] of the same modules
    is_tied: bool  # the float model's head is its embedding
    solved: dict[str, tuple[Weight, LinearReport]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: FloatModel, head: Scheme | None, embedding: Scheme | None
    ) -> "HeadAndEmbedding":
        """Check the requested schemes. Raises InputError if one cannot be written or read back."""
        wanted = {HEAD: head, EMBEDDING: embedding}
        schemes = {module: scheme for module, scheme in wanted.items() if scheme is not None}
        names = model.layer_map
        own = {HEAD: names.head, EMBEDDING: names.embedding}
        for module, scheme in schemes.items():
            if scheme.activation is not None or scheme.weight.type != "int":
                raise InputError(
                    f"{FLAGS[module]} {scheme}",
                    "expected integer codes and 16-bit activations",
                    "give a scheme such as w8a16-sym",
                )
            if own[module] != f"{module}.weight" or model.reader.other_parts:
                raise InputError(
                    FLAGS[module],
                    f"is not supported by models whose matrix is not {module}, found {own[module]}"
                    if own[module] != f"{module}.weight"
                    else "is not supported by vision-language models",
                    "remove it",
                )
        shape = tuple(model.entries[names.embedding].shape)
        return cls(
            schemes=schemes,
            shapes=dict.fromkeys(schemes, shape),
            is_tied=names.tied_head(model.config) is not None,
        )

    @property
    def overrides(self) -> list[tuple[str, Scheme]]:
        """Return overrides, each with a pattern that matches one module."""
        return [(f"re:^{module}$", scheme) for module, scheme in self.schemes.items()]

    @property
    def unties(self) -> bool:
        """True if a tied head is quantized, and so separated from the embedding."""
        return self.is_tied and HEAD in self.schemes

    def check(self, plan: Plan) -> None:
        """Raise InputError if the plan keeps a module in float, or its format cannot hold it."""
        for module, scheme in self.schemes.items():
            if plan.schemes[module] is None:
                reason = plan.reasons[module]
                remedy = "remove one of the two flags"  # the other one is --ignore
                if NO_WHOLE_GROUPS in reason:
                    remedy = "give a scheme with other groups, such as w8a16-sym-g32"
                raise InputError(f"{FLAGS[module]} {scheme}", reason, remedy)
            if module == EMBEDDING and not plan.layout.embeddings:
                raise InputError(
                    FLAGS[module],
                    f"{plan.layout.name} cannot hold a quantized embedding",
                    "use `output_format` compressed-tensors",
                )

    def solve_embedding(self, model: FloatModel, tensors: LayerState) -> None:
        """Round the embedding to nearest, because no other row could compensate a row's error.

        `tensors`: tensors outside of layers that a transform rewrote.
        """
        if EMBEDDING not in self.schemes:
            return
        name = model.layer_map.embedding
        weight_VD = tensors[name] if name in tensors else model.get(name)
        check_finite({name: weight_VD}, [name], str(model.folder))
        scheme = self.schemes[EMBEDDING]
        packed = rtn.solve(weight_VD, None, scheme.weight, EMBEDDING)
        report = LinearReport.measure(
            weight_VD, packed, scheme, name=EMBEDDING, seconds=0.0, notes=()
        )
        self.solved[EMBEDDING] = packed, report

    def solve_head(
        self,
        model: FloatModel,
        tensors: LayerState,
        stream: "Stream | None",
        recipe: Recipe,
        device: str,
    ) -> None:
        """Solve the head for the hidden states after the last layer.

        `tensors`: tensors outside of layers that a transform rewrote. `stream`: calibration data,
        or None if the recipe needs none.
        """
        if HEAD not in self.schemes:
            return
        names = model.layer_map
        last_norm, head = names.last_norm, names.head
        norm_D = tensors[last_norm] if last_norm in tensors else model.get(last_norm)
        head_VD = tensors[head] if head in tensors else model.head()
        check_finite({head: head_VD}, [head], str(model.folder))
        stats = None if stream is None else stream.head_statistics(norm_D)
        weights = {HEAD: head_VD.to(device)}
        self.solved[HEAD] = solve_linear(
            HEAD, weights, HEAD, stats, self.schemes[HEAD], recipe, None
        )

    def rows(self, embedding_VD: torch.Tensor) -> torch.Tensor:
        """Return the embedding that the quantized model reads: dequantized, if it was quantized."""
        if EMBEDDING not in self.solved:
            return embedding_VD
        return self.solved[EMBEDDING][0].dequantize()

    def head_of(self, head_VD: torch.Tensor, is_rewritten: bool) -> torch.Tensor:
        """Return the head that the quantized model computes with.

        `is_rewritten`: a transform has untied the head from the embedding.
        """
        is_table = self.is_tied and HEAD not in self.schemes and not is_rewritten
        found = self.solved.get(EMBEDDING if is_table else HEAD)
        return head_VD if found is None else found[0].dequantize().to(head_VD.device)

    def config_changes(self) -> dict[str, Any]:
        """Return the keys of config.json that change."""
        return {"tie_word_embeddings": False} if self.unties else {}

    def without(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the rewritten tensors without the quantized ones: they are written in float."""
        names = {f"{module}.weight" for module in self.schemes}
        return {name: tensor for name, tensor in tensors.items() if name not in names}

    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the report."""
        if not self.unties:
            return ()
        return (
            "embedding and head were one matrix; the head has codes of its own next to the"
            " embedding, and tie_word_embeddings is set to false",
        )
