"""A model corrected by a LoRA: add A and B into the weights, quantize the sums.

python examples/save_quantized/lora_corrected.py MODEL lora.safetensors OUT [FACTOR]

FACTOR multiplies every product of B and A, such as alpha / rank of an adapter of PEFT; default 1.
"""

import math
import sys

from safetensors.torch import load_file

import qserve
from formats.checkpoint import CheckpointReader
from qkernels import QuantLinear

if len(sys.argv) not in (4, 5):
    sys.exit(__doc__)
source, lora_file, target = sys.argv[1:4]
factor = float(sys.argv[4]) if len(sys.argv) == 5 else 1.0
lora = {name.removeprefix("base_model.model."): part for name, part in load_file(lora_file).items()}
reader, linears = CheckpointReader(source), {}
for name in [n.removesuffix(".weight") for n in reader.entries if n.endswith("_proj.weight")]:
    weight = reader.get(f"{name}.weight").float()
    if f"{name}.lora_A.weight" in lora:
        b, a = (lora.pop(f"{name}.lora_{key}.weight") for key in "BA")
        weight += factor * (b.float() @ a.float())
    size = math.gcd(weight.shape[1], 128)  # 64 of 576 inputs: vLLM takes 128, 64 and 32
    linears[name] = QuantLinear.from_float(weight, f"w4a16-sym-g{size}", name=name)
if lora:  # otherwise the model would be quantized without its correction
    sys.exit(f"{lora_file}: {min(lora)} is no lora_A or lora_B of a linear of {source}")
print(qserve.save_quantized(target, source, linears, format="compressed-tensors").to_text())
