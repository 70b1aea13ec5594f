"""A state dict of QuantLinear layers, kept in a safetensors file, to a whole model folder.

python examples/save_quantized/state_dict.py examples/models/docs-5m layers.safetensors OUT

These lines write such a file:

model = transformers.AutoModelForCausalLM.from_pretrained("examples/models/docs-5m")
names = qkernels.replace_linears(model, "w4a16-sym")
state = model.state_dict()
layers = {key: state[key] for key in state if key.rpartition(".")[0] in names}
safetensors.torch.save_file(layers, "layers.safetensors")
"""

import sys

from safetensors.torch import load_file

import qserve
from qkernels import QuantLinear

if len(sys.argv) != 4:
    sys.exit(__doc__)
source, file, target = sys.argv[1:]
state, linears = load_file(file), {}
for name in [key.removesuffix(".qweight") for key in state if key.endswith(".qweight")]:
    own = {key.rpartition(".")[2]: state[key] for key in state if key.startswith(f"{name}.")}
    (groups, outputs), inputs = own["scales"].shape, len(own["g_idx"])
    layer = QuantLinear(inputs, outputs, f"w4a16-sym-g{inputs // groups}", bias="bias" in own)
    layer.load_state_dict(own)
    linears[name] = layer
print(qserve.save_quantized(target, source, linears).to_text())
