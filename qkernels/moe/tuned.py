"""W4A16 experts as a tunable operation: configs of sm90_few_tokens, the only tunable variant."""

from qkernels.choice import KernelChoice
from qkernels.moe.config import ExpertsPlan
from qkernels.moe.experts import ExpertsProblem
from qkernels.moe.sm90_few_tokens_config import (
    FEW_TOKENS_ROWS,
    FewTokensTiles,
    few_tokens_tiles,
    few_tokens_tiles_fault,
)
from qkernels.moe.variants import SM90_FEW_TOKENS, layer_of
from qkernels.tuning import table as tuning_table
from qkernels.tuning.op import ConfigSpace, TunedOp
from qkernels.wna16.layout import has_fp4

CONSUMERS, STAGES, BLOCKS = (1, 2), (3, 4, 6, 8), (1, 2, 3, 4)


def _default(sm_count: int, *, group: int, **problem: int) -> FewTokensTiles | None:
    return few_tokens_tiles(sm_count=sm_count, **problem)


TUNED = TunedOp(
    name="moe_w4a16",
    configs={
        FewTokensTiles: ConfigSpace(
            fault=few_tokens_tiles_fault,
            options={
                "gate_up_consumers": CONSUMERS,
                "gate_up_blocks_per_sm": BLOCKS,
                "gate_up_stages": STAGES,
                "down_split": (1, 2, 3, 4, 6, 8),
                "down_consumers": CONSUMERS,
                "down_blocks_per_sm": BLOCKS,
                "down_stages": STAGES,
                "block_m": FEW_TOKENS_ROWS,
                "sorts": (False, True),
            },
        )
    },
    exact=("hidden", "inner", "num_experts", "top_k", "group"),
    bucketed=("M",),
    default=_default,
)


def tuned_problem(problem: ExpertsProblem, M: int) -> dict[str, int]:
    """Return the problem fields of a table row."""
    sizes = {name: getattr(problem, name) for name in ("hidden", "inner", "top_k")}
    sizes["num_experts"] = problem.routed_experts
    return sizes | {"group": problem.spec.group_length(problem.inner), "M": M}


def measured_plan(problem: ExpertsProblem, M: int, choice: KernelChoice) -> ExpertsPlan | None:
    """Return the plan that was measured as fastest on this GPU; None: no measurement applies."""
    variant = SM90_FEW_TOKENS
    asked = choice.only in (None, problem.kernel, variant.name) and variant.name not in choice.never
    if not asked or problem.spec is None or has_fp4(problem.spec):
        return None
    if variant.refuses(layer_of(problem)) is not None:
        return None
    table = tuning_table.tuning_table_of(problem.device)
    row = table.find(TUNED, **tuned_problem(problem, M))
    if row is None:
        return None
    return row.config.plan(M=M, top_k=problem.top_k, hidden=problem.hidden)
