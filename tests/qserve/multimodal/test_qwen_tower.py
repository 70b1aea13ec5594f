"""The towers of Qwen with the project's operations: embeddings are those of transformers."""

import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel

from formats.checkpoint import CONFIG, CheckpointReader, read_json
from formats.errors import CheckpointError, InputError
from formats.in_memory.weights import round_to_nearest
from formats.scheme import Scheme
from qkernels.operations import explain
from qserve.multimodal.families import VisionConfig
from qserve.multimodal.qwen_tower import QwenTower
from qserve.multimodal.rounded_linear import RoundedLinear, round_layers_
from qserve.multimodal.tower import Tower
from tests.tiny_vision import VISION_FAMILIES, write_tiny_vision

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
# rows and columns of patches: one window, parts of windows on both edges, a line
GRIDS = [(2, 2), (4, 4), (6, 10), (10, 6), (2, 34), (14, 18)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            folder = tmp_path_factory.mktemp("towers") / family
            write_tiny_vision(folder, family)
            made[family] = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        return made[family]

    return make


def expected(model, patches_BNP, grid):
    """transformers' embeddings [B, M, W] with the levels next to them, one image at a time."""
    rows = []
    for patches_NP in patches_BNP:
        found = model.get_image_features(patches_NP, torch.tensor([[1, *grid]]))
        levels = getattr(found, "deepstack_features", None) or ()
        levels = [each if isinstance(each, torch.Tensor) else each[0] for each in levels]
        rows.append(torch.cat([found.pooler_output[0], *levels], -1))
    return torch.stack(rows)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_embeddings_of_images_of_one_size(models, family, grid):
    model = models(family)
    torch.manual_seed(3)
    patches_BNP = torch.randn(3, grid[0] * grid[1], 3 * 2 * 8 * 8)
    found = QwenTower(model.visual).encode(patches_BNP, *grid)
    torch.testing.assert_close(found, expected(model, patches_BNP, grid), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[0], found[1], atol=0.1)


@torch.no_grad()
def test_a_level_after_the_last_block(models):
    model = models("qwen3_vl")
    tower = QwenTower(model.visual)
    last = len(model.visual.blocks) - 1
    model.visual.deepstack_visual_indexes = [0, last]
    tower._levels = (0, last)
    try:
        patches_BNP = torch.randn(1, 24, 3 * 2 * 8 * 8)
        found = tower.encode(patches_BNP, 4, 6)
        torch.testing.assert_close(
            found, expected(model, patches_BNP, (4, 6)), rtol=1e-4, atol=1e-4
        )
    finally:
        model.visual.deepstack_visual_indexes = [0, 2]


@torch.no_grad()
def test_rotations_of_a_tower_in_bfloat16_keep_their_frequencies(models, tmp_path):
    """Rounded ones would turn a patch of a large image by a tenth more or less."""
    family = "qwen3_vl"
    model, folder = models(family), write_tiny_vision(tmp_path / family, family)
    tower = Tower.load(
        VisionConfig.of(read_json(folder / CONFIG)),
        folder,
        CheckpointReader(folder).other_parts,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
    )
    found, wanted = (
        each.plan(2, 80).cos_sin_ND for each in (tower.of_grids, QwenTower(model.visual))
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_tower_with_nan_is_refused(tmp_path):
    folder = write_tiny_vision(tmp_path / "gemma3", "gemma3")
    path = folder / "model.safetensors"
    state = load_file(path)
    name = next(each for each in state if "vision_tower" in each and each.endswith("fc1.weight"))
    state[name].view(-1)[-1] = math.nan
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"^{re.escape(name)}: NaN or infinity"):
        Tower.load(
            VisionConfig.of(read_json(folder / CONFIG)),
            folder,
            CheckpointReader(folder).other_parts,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_tower_holds_the_bytes_of_the_vision_part_alone(family, tmp_path):
    """The text part's embedding alone would be 1.5 GiB for 150,000 tokens of 5,120 channels."""
    folder = write_tiny_vision(tmp_path / family, family)
    reader, config = CheckpointReader(folder), VisionConfig.of(read_json(folder / CONFIG))
    tower = Tower.load(
        config, folder, reader.other_parts, device=torch.device("cpu"), dtype=torch.float32
    )
    prefixes = tuple(config.family.prefixes)
    stored = {
        name: math.prod(entry.shape)
        for name, entry in reader.other_parts.items()
        if name.startswith(prefixes)
    }
    assert sum(each.numel() for each in tower.state_dict().values()) == sum(stored.values())


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-fp8"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_rounded_linears_are_those_of_transformers_with_rounded_weights(family, scheme, tmp_path):
    """Also the inputs are rounded, to 8 bits for each row."""
    folder = write_tiny_vision(tmp_path / family, family)
    model, plain = (AutoModel.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    scheme = Scheme.parse(scheme)
    for module in model.visual.blocks.modules():
        if isinstance(module, torch.nn.Linear):
            rounded = round_to_nearest(module.weight, scheme.weight).dequantize()
            module.weight.data = rounded.float()
            module.register_forward_pre_hook(lambda _, args: (nearest(args[0], scheme),))
    patches_BNP = torch.randn(2, 24, 3 * 2 * 8 * 8)
    tower = QwenTower(plain.visual)
    before = tower.encode(patches_BNP, 4, 6)
    round_layers_(plain, scheme)
    found, wanted = tower.encode(patches_BNP, 4, 6), expected(model, patches_BNP, (4, 6))
    error, change = ((each - wanted).norm() / wanted.norm() for each in (found, before))
    assert error < 0.6 * change  # values near the middle of two codes get the other one
    assert change > 0.002


def nearest(x_TK, scheme):
    """Inputs rounded to the codes of each row."""
    largest_T1 = x_TK.abs().amax(-1, keepdim=True)
    if scheme.activation.type == "float":
        scales_T1 = largest_T1 / 448
        return (x_TK / scales_T1).to(torch.float8_e4m3fn).float() * scales_T1
    scales_T1 = largest_T1 / 127
    return (x_TK / scales_T1).round().clamp(-128, 127) * scales_T1


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-fp8"])
@torch.no_grad()
def test_sizes_that_no_kernel_takes_are_padded(scheme):
    """Qwen3-VL and SigLIP have 4304 inner features: kernels take multiples of 32."""
    scheme, (first, last) = Scheme.parse(scheme), (nn.Linear(64, 4304), nn.Linear(4304, 64))
    x_TK = torch.randn(5, 64)
    inner_TI = RoundedLinear.of(first, scheme, "mlp.fc1")(x_TK)
    assert inner_TI.shape == (5, 4320)
    assert not inner_TI[:, 4304:].any()
    rounded = RoundedLinear.of(last, scheme, "mlp.fc2")
    act_TI = nn.functional.gelu(inner_TI)
    assert torch.equal(rounded(act_TI), rounded(act_TI[:, :4304]))
    weight_NK = round_to_nearest(last.weight, scheme.weight).dequantize()
    wanted = nn.functional.linear(nearest(act_TI[:, :4304], scheme), weight_NK, last.bias)
    torch.testing.assert_close(rounded(act_TI), wanted, rtol=1e-3, atol=1e-3)
    spec = {"spec": scheme.weight, "activation": scheme.activation, "dtype": torch.bfloat16}
    found = explain("linear", device="cuda", in_features=4320, out_features=1152, **spec)
    assert "-> sm90_w8a8" in str(found) or "-> triton_w8a8" in str(found)


def test_unknown_activation_is_refused(models, monkeypatch):
    visual = models("qwen3_vl").visual
    monkeypatch.setattr(visual.config, "hidden_act", "mish")
    with pytest.raises(InputError, match="hidden_act: expected gelu_pytorch_tanh"):
        QwenTower(visual)
