"""A transformers model and a solver of one's own: round each linear, save the codes.

python examples/save_quantized/own_solver.py examples/models/docs-5m /tmp/own-solver [codes.npz]

codes.npz: also keep the codes and scales as numpy arrays, for numpy_codes.py.
"""

import math
import sys

import numpy
import torch
from transformers import AutoModelForCausalLM

import qserve

if len(sys.argv) not in (3, 4):
    sys.exit(__doc__)
source, target, *arrays_file = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
linears = {}
for name, module in model.named_modules():
    if isinstance(module, torch.nn.Linear) and ".layers." in name:
        size = math.gcd(module.in_features, 128)  # 64 of 576 inputs: vLLM takes 128, 64 and 32
        groups = module.weight.detach().unflatten(1, (-1, size))  # your solver starts here
        scales = (groups.abs().amax(-1) / 7).clamp(min=1e-5)
        codes = (groups / scales[..., None]).round().clamp(-8, 7) + 8
        linears[name] = (codes.flatten(1).to(torch.uint8), scales)
if arrays_file:
    parts = (("codes", 0), ("scales", 1))
    arrays = {f"{n}.{part}": each[at].numpy() for n, each in linears.items() for part, at in parts}
    numpy.savez(arrays_file[0], **arrays)
print(qserve.save_quantized(target, source, linears).to_text())
