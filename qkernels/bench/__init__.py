"""How the kernels are measured: `qserve bench kernels`. A server never imports it."""
