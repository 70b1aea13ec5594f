"""From float weights to codes, one decoder layer at a time. Imports neither qkernels nor qserve."""
