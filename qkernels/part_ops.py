"""The product that leaves parts of K to the operation after it. Knows no kernel.

As ops.py, whose legend this is.
"""

import torch

from qkernels import dispatch
from qkernels.checks import check_linear
from qkernels.partial_sums import LinearOutput, PartReader
from qkernels.prepared import PreparedWeight


def linear_for(
    reader: PartReader,
    x: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
) -> LinearOutput:
    """`linear` whose result one operation takes, and adds parts of K itself where that is faster.

    `reader` says which: add_rms_norm or add_rms_norm_quantize; or rope_write_kv_, by split_heads.
    Of rows for which `digit_form` makes digits, nothing is left.
    """
    check_linear(x, weight, bias)
    module = dispatch.linear_module(weight.kernel)
    run = getattr(module, "linear_for", None)
    x = weight.sorted_inputs(x)
    return module.linear(x, weight, bias) if run is None else run(reader, x, weight, bias)
