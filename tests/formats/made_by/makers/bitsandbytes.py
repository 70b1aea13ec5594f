"""Folders of bitsandbytes, which transformers calls."""

from pathlib import Path

from makers.golden import Golden, Weights
from makers.linears import by_transformers, projections


def bitsandbytes(source: Path, target: Path, **options: object) -> Weights:
    import bitsandbytes as bnb
    from transformers import BitsAndBytesConfig

    model = by_transformers(source, target, BitsAndBytesConfig(**options))
    found = {}
    for name, module in projections(model).items():
        weight = module.weight
        if isinstance(module, bnb.nn.Linear4bit):
            found[name] = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        else:
            found[name] = bnb.functional.int8_vectorwise_dequant(weight.data, weight.SCB)
    return found


FOLDERS = {
    f"bitsandbytes-{name}": Golden(
        distribution="bitsandbytes",
        write=bitsandbytes,
        options=options,
        model="narrow",
        whole=True,
    )
    for name, options in {
        "nf4": {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
        "fp4": {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "fp4",
            "bnb_4bit_quant_storage": "bfloat16",
        },
        "int8": {"load_in_8bit": True},
    }.items()
}
