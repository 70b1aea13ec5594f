"""Codes from a numpy file, whoever made them: NAME.codes, NAME.scales, NAME.zeros (if asymmetric).

own_solver.py writes such a file:

python examples/save_quantized/own_solver.py examples/models/docs-5m /tmp/own-solver codes.npz
python examples/save_quantized/numpy_codes.py examples/models/docs-5m codes.npz /tmp/from-numpy
"""

import sys

import numpy

import qserve

if len(sys.argv) != 4:
    sys.exit(__doc__)
source, file, target = sys.argv[1:]
arrays = numpy.load(file)
names = [key.removesuffix(".codes") for key in arrays.files if key.endswith(".codes")]
linears = {
    name: (arrays[f"{name}.codes"], arrays[f"{name}.scales"], arrays.get(f"{name}.zeros"))
    for name in names
}
print(qserve.save_quantized(target, source, linears).to_text())
