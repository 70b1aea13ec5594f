"""Loading rules for bitsandbytes, torchao, HQQ and GGUF, one row each.

Versions as in rules.py.
"""

from formats.compatibility.loads_in import Rule
from formats.compatibility.terms import (
    OTHERS,
    OURS,
    OWN_SOURCE,
    SGLANG,
    SGLANG_SOURCE,
    TRANSFORMERS,
    VLLM,
    VLLM_SOURCE,
    any_scheme,
    row,
)
from formats.gguf.block_types import BLOCK_TYPES
from formats.in_memory.dense import is_dense

# types of GGUF's blocks: a linear of such a type that is read as floats was dequantized
BLOCKS = {row.name.lower() for row in BLOCK_TYPES.values() if row.decoded and not row.float_dtype}
OTHER_RULES: tuple[Rule, ...] = (
    row(
        "own-dense",
        OURS,
        "slow",
        any_scheme(
            lambda s: is_dense(s.weight),
            "no kernel takes its codes: weights are dequantized to 16 bits at load",
        ),
        OWN_SOURCE,
    ),
    row(
        "staged-gguf",
        OTHERS,
        "no",
        lambda f: "does not know gguf-blocks: `qserve convert` writes other formats",
        "formats/gguf/staged.py: a format of this project alone, for what becomes a GGUF file",
        "gguf-blocks",
    ),
    row(
        "bitsandbytes-vllm",
        VLLM,
        "no",
        lambda f: "0.33 has no quant_method bitsandbytes (older versions had one)",
        f"{VLLM_SOURCE}/__init__.py of 0.33.0",
        "bitsandbytes",
    ),
    row(
        "bitsandbytes-sglang",
        SGLANG,
        "yes",
        lambda f: "with bitsandbytes installed",
        f"{SGLANG_SOURCE}/bitsandbytes.py of 0.5.23",
        "bitsandbytes",
    ),
    row(
        "bitsandbytes-transformers",
        TRANSFORMERS,
        "yes",
        lambda f: "with bitsandbytes installed",
        "transformers 5.23.0 and bitsandbytes 0.50.2, run",
        "bitsandbytes",
    ),
    row(
        "torchao-vllm",
        VLLM,
        "yes",
        lambda f: "with torchao installed",
        f"{VLLM_SOURCE}/torchao.py of 0.33.0",
        "torchao",
    ),
    row(
        "torchao-sglang",
        SGLANG,
        "no",
        lambda f: "has no quant_method torchao",
        f"{SGLANG_SOURCE}/__init__.py of 0.5.23",
        "torchao",
    ),
    row(
        "torchao-transformers",
        TRANSFORMERS,
        "yes",
        lambda f: "with torchao installed",
        "transformers 5.23.0 and torchao 0.18.0, run",
        "torchao",
    ),
    row(
        "hqq-servers",
        (VLLM, SGLANG),
        "no",
        lambda f: "has no quant_method hqq",
        f"{VLLM_SOURCE}/__init__.py of 0.33.0, {SGLANG_SOURCE}/__init__.py of 0.5.23",
        "hqq",
    ),
    row(
        "hqq-transformers",
        TRANSFORMERS,
        "no",
        lambda f: "5.23 refuses it: HQQ is not available yet",
        "transformers 5.23.0, run",
        "hqq",
    ),
    row(
        "gguf-own",
        OURS,
        "slow",
        lambda f: (
            any("float" in each.traits and each.scheme in BLOCKS for each in f.linears)
            and "no kernel takes some of its linears: they are dequantized at load (see the table)"
        ),
        OWN_SOURCE,
        "gguf",
    ),
    row(
        "gguf-vllm",
        VLLM,
        "no",
        lambda f: "reads GGUF only with its plugin vllm-gguf-plugin installed",
        "vllm-project/vllm #39583",
        "gguf",
    ),
    row(
        "gguf-sglang",
        SGLANG,
        "not judged",
        lambda f: "reads GGUF of some architectures; not run here",
        f"{SGLANG_SOURCE}/gguf.py of 0.5.23",
        "gguf",
    ),
    row(
        "gguf-transformers",
        TRANSFORMERS,
        "slow",
        lambda f: "with gguf installed, and gguf_file: dequantizes all weights",
        "transformers/integrations/gguf of 5.24.0, run with llama and gemma3",
        "gguf",
    ),
)
