"""Experts for few tokens on sm_90 without a GPU: the kernel's source in plain torch against the
reference, with groups that fill K steps and groups that are shorter."""

import functools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from formats.scheme import Scheme
from qkernels import reference
from qkernels.moe import sm90_few_tokens, triton_experts
from qkernels.moe.routing import SILU, Routing
from qkernels.moe.sm90_few_tokens_config import FewTokensConfig
from qkernels.moe.triton_active import ActiveExperts
from qkernels.wna16.prepack import VALUE_OF_ZERO
from tests.qkernels import plain_gluon
from tests.qkernels.moe_case import make_experts

DTYPE, E, K = torch.bfloat16, 3, 2
SPLIT = 2


class Descriptor(plain_gluon.Descriptor):
    """A descriptor whose dtype is that of shared memory."""

    def __init__(self, base: torch.Tensor, block: list[int]) -> None:
        super().__init__(base, tuple(block))
        self.dtype = base.dtype


def codes_minus_zeros(packed, offsets, dtype):
    """Unpack codes as notes/layouts.md says, in torch.

    Word t of 32 inputs has input 16 i + 8 h + 2 t + e at bit 8 i + 4 h + 16 e.
    """
    words = packed.unflatten(1, (4, -1)).transpose(1, 2)  # [64, C, t]
    i, h, e = torch.meshgrid(*[torch.arange(2)] * 3, indexing="ij")
    bits = 8 * i + 4 * h + 16 * e
    codes = words[..., None, None, None] >> bits & 15  # [64, C, t, i, h, e]
    codes = codes.permute(0, 1, 3, 4, 2, 5).flatten(1)
    return (codes + VALUE_OF_ZERO[dtype, 4] - offsets.float()[:, None]).float()


FAKES = {
    "codes_minus_zeros": codes_minus_zeros,
    "zeros_to_subtract": lambda offset, dtype: offset,
    "scale_of_codes": lambda scale, dtype: scale,
}


def entries(ids_Mk: torch.Tensor) -> ActiveExperts:
    chosen = ids_Mk.unique().tolist()
    return ActiveExperts(
        list=torch.tensor([len(chosen), *chosen], dtype=torch.int32), most=len(chosen)
    )


@pytest.fixture
def run(monkeypatch):
    """Run both products of the kernel's source on a CPU: [M, hidden] and the reference's."""
    launch = functools.partial(plain_gluon.launch, fakes=FAKES)
    monkeypatch.setattr(sm90_few_tokens, "launch", launch)
    monkeypatch.setattr(sm90_few_tokens, "descriptor", Descriptor)
    monkeypatch.setattr(sm90_few_tokens, "sm_count", lambda device: 3)

    def run(scheme: str, hidden: int, inner: int, M: int, num_consumers: int, columns: int):
        weights = make_experts(
            Scheme.parse(scheme), hidden, inner, E, K, glu=SILU, bias=False, dtype=DTYPE
        )
        prepared = triton_experts.prepare_experts(weights, DTYPE, torch.device("cpu"))
        generator = torch.Generator().manual_seed(M)
        x = torch.randn(M, hidden, generator=generator).to(DTYPE)
        logits = torch.randn(M, E, generator=generator)
        routes = reference.route(logits, Routing(num_experts=E, top_k=K, normalized=True))
        ids, active = routes.ids_Mk.contiguous(), entries(routes.ids_Mk)
        settings = {"block_m": columns, "num_consumers": num_consumers, "blocks_per_sm": 1}
        first = FewTokensConfig(**settings, stages=3)
        second = FewTokensConfig(**settings, stages=2, split=SPLIT)
        h = sm90_few_tokens.gate_up(x, ids, active, prepared.gate_up, SILU, first)
        parts = torch.full((SPLIT * K, M, hidden), float("nan"))
        weights_Mk = routes.weights_Mk.contiguous()
        sm90_few_tokens.down(h, ids, weights_Mk, active, prepared.down, second, parts)
        plain = reference.prepare_experts(weights, DTYPE, "cpu")
        return parts.sum(0), reference.experts(x, routes, plain)

    return run


@pytest.mark.parametrize(
    ("scheme", "hidden", "inner", "num_consumers", "columns"),
    [
        ("w4a16-sym", 256, 384, 1, 8),
        ("w4a16-asym-g64", 256, 384, 2, 8),
        ("w4a16-sym-g64", 192, 320, 1, 16),  # 1.5 and 2.5 K steps
        ("w4a16-sym-g32", 256, 384, 1, 8),
        ("w4a16-asym-g32", 192, 352, 1, 16),  # 1.5 and 2.75 K steps; groups two at a time
        ("w4a16-sym-g32", 256, 320, 2, 32),  # one at a time
    ],
)
@pytest.mark.parametrize("M", [1, 5])
def test_each_group_has_its_scale(
    run, assert_close, tolerance, poison, scheme, hidden, inner, num_consumers, columns, M
):
    got, want = run(scheme, hidden, inner, M, num_consumers, columns)
    assert_close(scheme, want.float(), got, 2 * tolerance(DTYPE))
