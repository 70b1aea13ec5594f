"""A model corrected by a LoRA: add A and B into the weights, quantize the sums.

python examples/save_quantized/lora_corrected.py examples/models/docs-5m lora.safetensors OUT
"""

import math
import sys

from safetensors.torch import load_file

import qserve
from formats.checkpoint import CheckpointReader
from qkernels import QuantLinear

if len(sys.argv) != 4:
    sys.exit(__doc__)
source, lora_file, target = sys.argv[1:]
reader, lora = CheckpointReader(source), load_file(lora_file)
linears = {}
for name in [n.removesuffix(".weight") for n in reader.entries if n.endswith("_proj.weight")]:
    weight = reader.get(f"{name}.weight").float()
    if f"{name}.lora_A.weight" in lora:
        weight += lora[f"{name}.lora_B.weight"].float() @ lora[f"{name}.lora_A.weight"].float()
    size = math.gcd(weight.shape[1], 128)  # 64 of 576 inputs: vLLM takes 128, 64 and 32
    linears[name] = QuantLinear.from_float(weight, f"w4a16-sym-g{size}", name=name)
print(qserve.save_quantized(target, source, linears, format="compressed-tensors").to_text())
