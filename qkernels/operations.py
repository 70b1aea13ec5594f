"""Table of the operations by name, and `explain`, which shows the choice of a kernel."""

from qkernels import dispatch
from qkernels.attention import rows as attention
from qkernels.causal_conv import rows as causal_conv
from qkernels.delta_net import rows as delta_net
from qkernels.dispatch import Explanation, Operation
from qkernels.drafts import rows as drafts
from qkernels.errors import KernelError
from qkernels.latent import rows as latent
from qkernels.linear import rows as linear
from qkernels.lora import rows as lora
from qkernels.mamba1 import rows as mamba1
from qkernels.mamba2 import rows as mamba2
from qkernels.moe import rows as moe
from qkernels.rowwise import rows as rowwise
from qkernels.sampling import rows as sampling

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for folder in (
        *(linear, attention, latent, rowwise, moe, lora),
        *(causal_conv, delta_net, mamba1, mamba2, sampling, drafts),
    )
    for operation in folder.OPERATIONS
}


def operation(name: str) -> Operation:
    """Return the operation with this name. Raises KernelError if the name is unknown."""
    found = OPERATIONS.get(name)
    if found is None:
        known = ", ".join(OPERATIONS)
        raise KernelError(f"operation {name!r}", "unknown", f"known operations: {known}")
    return found


def explain(op: str, **problem: object) -> Explanation:
    """Explain for every row of an operation whether it is chosen, and why.

    `problem` holds fields of Problem. Raises KernelError for an unknown operation.
    """
    return dispatch.explain(operation(op), **problem)
