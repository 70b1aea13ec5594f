"""Plain torch references of norms, activations and conversions, which define the kernels' results.

Legend: M rows of x, K inputs, C channels, I features, V tokens.
"""

import torch
import torch.nn.functional as F

from formats.numerics.activation import quantize_input as round_input
from formats.scheme import ActivationSpec
from qkernels.operands.codes import Codes, InputRounding
from qkernels.operands.forms import InputForm, LinearInput
from qkernels.operands.limbs import LimbForm
from qkernels.operands.limbs_reference import to_limbs
from qkernels.operands.split_k import LinearOutput, reduced
from qkernels.rowwise.spec import PLAIN, ActSpec, Branch, NormSpec

_ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def norm(
    x: LinearOutput,
    residual: torch.Tensor | None,
    spec: NormSpec | None,
    out: InputForm = None,
    branch: Branch = PLAIN,
    addend: torch.Tensor | None = None,
) -> tuple[LinearInput, torch.Tensor]:
    """Apply `branch` to x, or to x + addend, and add the residual.

    Returns (the norm of the sum in the form `out`, the sum).

    Every intermediate result (x + addend, the branch's norm, its product, the sum) is rounded to
    x's dtype.
    """
    total = reduced(x) if addend is None else reduced(x) + addend
    if residual is not None:
        if branch.norm is not None:
            total = normalized(total, branch.norm)
        if branch.factor != 1:
            total = total * branch.factor
        total = total + residual
    normed = total if spec is None else normalized(total, spec)
    return in_form(normed, out), total


def normalized(x: torch.Tensor, spec: NormSpec) -> torch.Tensor:
    """Normalize x over its last dim.

    An RMS norm rounds as transformers' LlamaRMSNorm, or with a float32 weight as GemmaRMSNorm. A
    layer norm rounds as torch.nn.LayerNorm and transformers' CohereLayerNorm.
    """
    x_float, weight_C = x.float(), spec.weight_C
    if spec.kind == "rms":
        normed = x_float * torch.rsqrt(x_float.square().mean(-1, keepdim=True) + spec.eps)
        return (weight_C * normed.to(weight_C.dtype)).to(x.dtype)
    centred = x_float - x_float.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + spec.eps)
    normed = centred * inverse * weight_C.float()
    if spec.bias_C is not None:
        normed = normed + spec.bias_C.float()
    return normed.to(x.dtype)


def activate(x: torch.Tensor, spec: ActSpec, out: InputForm = None) -> LinearInput:
    """Return activation(x) of x [..., I], or activation(gate) * up of x [..., 2 I], gate first."""
    gate, up = x.chunk(2, dim=-1) if spec.gated else (x, None)
    if spec.kind == "swiglu_oai":
        if spec.limit is not None:
            gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
        return in_form((up + 1) * (gate * torch.sigmoid(gate * spec.alpha)), out)
    y = _ACTIVATIONS[spec.kind](gate)
    if spec.limit is not None:
        y = y.clamp(max=spec.limit)
        up = None if up is None else up.clamp(-spec.limit, spec.limit)
    return in_form(y if up is None else y * up, out)


def in_form(x_MK: torch.Tensor, form: InputForm) -> LinearInput:
    """Convert a tensor to a form."""
    if isinstance(form, InputRounding):
        return Codes(*quantize_input(x_MK, *form))
    return to_limbs(x_MK, form) if isinstance(form, LimbForm) else x_MK


def quantize_input(
    x_MK: torch.Tensor, activation: ActivationSpec, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x [M, K] to (codes [M, K], scales [M, S]); with groups, the codes may be padded."""
    return round_input(x_MK, activation, scale)


def embed_norms(
    tokens_M: torch.Tensor,
    table_VC: torch.Tensor,
    table_norm_C: torch.Tensor,
    state_MC: torch.Tensor,
    state_norm_C: torch.Tensor,
    eps: float,
    out: InputForm = None,
) -> tuple[LinearInput, torch.Tensor]:
    """Reference of ops.embed_norms."""
    embedded_MC = normalized(table_VC[tokens_M], NormSpec(weight_C=table_norm_C, eps=eps))
    normed_MC = normalized(state_MC, NormSpec(weight_C=state_norm_C, eps=eps))
    return in_form(torch.cat([embedded_MC, normed_MC], 1), out), normed_MC
