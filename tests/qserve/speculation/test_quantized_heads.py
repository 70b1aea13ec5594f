"""Quantized heads draft as their codes say: like heads that hold the same weights in float."""

import json

import pytest
import torch
from safetensors.torch import save_file

from calibrate.heads.quantize import quantize_head
from formats.heads.folder import HeadFolder
from formats.layouts import decode_linear, layout_of, tensor_names
from formats.scheme import Scheme
from qserve.speculation.drafter import DEVICE_DRAFTERS, build_device_drafter
from tests.qserve.speculation.head_steps import HEAD, Text, context_of, load_target, write_head
from tests.qserve.speculation.test_block_heads import DFLASH, DSPARK, NORMS
from tests.qserve.speculation.test_other_heads import write_medusa

S, K = 9, 3
EAGLE3 = {**HEAD, "draft_vocab_size": 512, "num_hidden_layers": 2}
IN_ONE_PASS = {
    "dflash": (DFLASH, NORMS),
    "dspark": ({**DSPARK, "markov_rank": 32, "markov_head_type": "gated"}, NORMS),
    "peagle": ({**EAGLE3, "ptd_token_id": 500}, ("mask_hidden",)),
}


@pytest.fixture(scope="module")
def target(tiny_model):
    return load_target(tiny_model("llama"))


def dequantized(codes: HeadFolder, folder) -> None:
    """Write the head that `codes` encode, in float."""
    layout, tensors = layout_of(codes.quant), {}
    modules = set()
    for name in codes.entries:
        module = name.rpartition(".")[0]
        if name.endswith(("qweight", "weight_scale")):
            found = tensor_names(module, layout, codes.entries)
            weight = decode_linear(module, {f: codes.get(n) for f, n in found.items()}, codes.quant)
            tensors[f"{module}.weight"] = weight.dequantize()
            modules.add(module)
    for name in codes.entries:
        module, _, leaf = name.rpartition(".")
        if module not in modules or leaf == "bias":
            tensors[name] = codes.get(name)
    folder.mkdir()
    config = {key: value for key, value in codes.raw.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("scheme", ["w4a16-sym", "w8a8"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle", "medusa", *IN_ONE_PASS])
def test_head_drafts_with_stored_codes(kind, scheme, target, tmp_path):
    assert kind in DEVICE_DRAFTERS
    if kind == "medusa":
        write_medusa(tmp_path / "source", "medusa_lm_head.pt")
    else:
        config, extra = IN_ONE_PASS.get(kind, (EAGLE3 if kind == "eagle3" else HEAD, ()))
        write_head(tmp_path / "source", config, extra=extra)
    quantize_head(
        tmp_path / "source",
        tmp_path / "codes",
        scheme=Scheme.parse(scheme, 32 if scheme.startswith("w4") else None),
        recipe="rtn",
        progress=False,
    )
    dequantized(HeadFolder(tmp_path / "codes"), tmp_path / "float")
    ids = torch.randint(0, 512, (S + 1,), generator=torch.Generator().manual_seed(6))
    logits = {}
    for name in ("source", "codes", "float"):
        drafter = build_device_drafter(context_of(tmp_path / name, target, method=kind))
        # the same tokens follow, so that all heads see the same
        _, found = Text(target, drafter).step(ids, 0, S, num_drafts=K, last=S - 1, given=[5, 6, 7])
        logits[name] = torch.cat(found)
    spread = logits["float"].std()
    error = (logits["codes"] - logits["float"]).std() / spread
    # products in another order; inputs of W8A8 are rounded to 8 bits
    assert error < (1e-4 if scheme == "w4a16-sym" else 0.05)
    # and rounding has changed the weights, so that the two could differ
    assert (logits["source"] - logits["float"]).std() / spread > 0.002
