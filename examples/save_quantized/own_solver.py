"""A transformers model and a solver of one's own: round each linear, save the codes.

python examples/save_quantized/own_solver.py examples/models/docs-5m /tmp/own-solver
"""

import math
import sys

import torch
from transformers import AutoModelForCausalLM

import qserve

if len(sys.argv) != 3:
    sys.exit(__doc__)
source, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
linears = {}
for name, module in model.named_modules():
    if isinstance(module, torch.nn.Linear) and ".layers." in name:
        size = math.gcd(module.in_features, 128)  # 64 of 576 inputs: vLLM takes 128, 64 and 32
        groups = module.weight.detach().unflatten(1, (-1, size))  # your solver starts here
        scales = (groups.abs().amax(-1) / 7).clamp(min=1e-5)
        codes = (groups / scales[..., None]).round().clamp(-8, 7) + 8
        linears[name] = (codes.flatten(1).to(torch.uint8), scales)
print(qserve.save_quantized(target, source, linears).to_text())
