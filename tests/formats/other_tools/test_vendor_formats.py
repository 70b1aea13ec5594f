"""modelopt, Quark, AutoRound's floats and MX formats: decoded by hand, converted, damaged."""

import json

import pytest
import torch
from safetensors.torch import save_file

from formats.checkpoint import CheckpointReader
from formats.codecs import compressed_tensors
from formats.codecs.microscaling import exponents_of, powers_of_two
from formats.convert import convert_checkpoint
from formats.errors import CheckpointError, InputError
from formats.in_memory.fp4 import Fp4Weight
from formats.inspection.inspect import inspect_checkpoint
from formats.layouts import decode_dense, layout_of, tensor_names
from formats.quant_config import BLOCK, QuantConfig, find_block
from formats.scheme import MXFP8, Scheme
from tests.formats.conftest import SHAPES

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
Q0 = "model.layers.0.self_attn.q_proj"


def random_bytes(*shape, low=0, high=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(torch.uint8)


def float8(*shape, seed=0):
    """Numbers without NaN."""
    return random_bytes(*shape, high=0x78, seed=seed).view(torch.float8_e4m3fn)


def fp4_by_hand(bytes_NB):
    """The published table of e2m1, the even input in the low four bits."""
    table = torch.tensor([*E2M1, *(-number for number in E2M1)])
    return torch.stack([table[(bytes_NB & 15).int()], table[(bytes_NB >> 4).int()]], -1).flatten(1)


# kind -> (block, tensors and weight [N, K] of one linear)
def modelopt_fp8(N, K):
    codes, scale = float8(N, K), torch.tensor(0.02)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.1)}
    return tensors, codes.float() * scale


def modelopt_nvfp4(N, K):
    codes, scales = random_bytes(N, K // 2), float8(N, K // 16, seed=1)
    factor = torch.tensor(0.0123)
    tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": factor}
    steps = (scales.float() * factor).repeat_interleave(16, 1)
    return {**tensors, "input_scale": torch.tensor(0.1)}, fp4_by_hand(codes) * steps


def modelopt_awq(N, K):
    """Two outputs in a byte, in two's complement; inputs are multiplied first."""
    codes, scales = random_bytes(N // 2, K), torch.rand(N, K // 32) + 0.1
    factors = torch.rand(K) + 0.5
    signed = torch.stack([codes & 15, codes >> 4], 1).flatten(0, 1).to(torch.int8)
    signed = torch.where(signed > 7, signed - 16, signed).float()
    weight = signed * scales.repeat_interleave(32, 1) * factors
    return {"weight": codes, "weight_scale": scales, "pre_quant_scale": factors}, weight


def quark_mxfp4(N, K):
    codes, exponents = random_bytes(N, K // 2), random_bytes(N, K // 32, low=115, high=125)
    steps = torch.pow(2.0, exponents.float() - 127).repeat_interleave(32, 1)
    return {"weight": codes, "weight_scale": exponents}, fp4_by_hand(codes) * steps


def quark_int4(N, K):
    """int32 words of eight outputs, in AWQ's order: nibble i holds output order[i]."""
    signed = torch.randint(-8, 8, (K, N), generator=torch.Generator().manual_seed(0))
    words = torch.zeros(K, N // 8, dtype=torch.int64)
    for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= (signed[:, output::8] & 15) << 4 * nibble
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    scales = torch.rand(K // 32, N) + 0.1
    weight = signed.float() * scales.repeat_interleave(32, 0)
    zeros = torch.zeros(K // 32, N // 8, dtype=torch.int32)
    tensors = {"weight": words, "weight_scale": scales, "weight_zero_point": zeros}
    return tensors, weight.t()


def mxfp8(N, K):
    codes, exponents = float8(N, K), random_bytes(N, K // 32, low=115, high=125)
    steps = torch.pow(2.0, exponents.float() - 127).repeat_interleave(32, 1)
    return {"weight": codes, "weight_scale": exponents}, codes.float() * steps


def mxfp6(N, K):
    """Four e2m3 codes in three bytes, the lowest input in the lowest bits."""
    codes = random_bytes(N, K, high=64).long()
    exponents = random_bytes(N, K // 32, low=115, high=125)
    words = sum(codes[:, i::4] << 6 * i for i in range(4))
    packed = torch.stack([words >> shift & 255 for shift in (0, 8, 16)], -1).flatten(1)
    mantissa, exponent = codes & 7, codes >> 3 & 3
    numbers = torch.where(exponent == 0, mantissa / 8, (1 + mantissa / 8) * 2.0 ** (exponent - 1))
    numbers = torch.where(codes >= 32, -numbers, numbers)
    steps = torch.pow(2.0, exponents.float() - 127).repeat_interleave(32, 1)
    tensors = {"weight_packed": packed.to(torch.uint8), "weight_scale": exponents}
    return tensors, numbers * steps


def modelopt(algorithm, **values):
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **values}


def quark(weight, inputs=None):
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": inputs},
        "exclude": ["lm_head"],
        "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
    }


def compressed(bits, layout):
    weights = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32}
    weights |= {"symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8"}
    group = {"targets": ["Linear"], "weights": weights, "format": layout}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


MX4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:llm_compressor",
    "bits": 8,
    "group_size": 32,
    "data_type": "mx_fp",
    "act_bits": 8,
}
KINDS = {
    "modelopt-fp8": (modelopt("FP8"), modelopt_fp8),
    "modelopt-nvfp4": (modelopt("NVFP4"), modelopt_nvfp4),
    "modelopt-awq": (modelopt("W4A16_AWQ", group_size=32), modelopt_awq),
    "quark-mxfp4": (quark(MX4, {**MX4, "is_dynamic": True}), quark_mxfp4),
    "quark-int4": (
        quark({"dtype": "int4", "qscheme": "per_group", "group_size": 32}),
        quark_int4,
    ),
    "mxfp8": (compressed(8, "mxfp8-quantized"), mxfp8),
    "mxfp6": (compressed(6, "mxfp6-pack-quantized"), mxfp6),
    "auto-round-mxfp8": (AUTO_ROUND, mxfp8),
}


@pytest.fixture
def model_of(float_model):
    """model_of(kind) -> (tensors, config, weights by module)."""

    def make(kind):
        tensors, config = float_model
        block, tensors_of = KINDS[kind]
        weights, state = {}, {}
        for name, tensor in tensors.items():
            module = name.removesuffix(".weight")
            local = module.split(".", 3)[-1]
            if local not in SHAPES:
                state[name] = tensor
                continue
            fields, weights[module] = tensors_of(*SHAPES[local])
            state |= {f"{module}.{field}": value for field, value in fields.items()}
        return state, {**config, BLOCK: json.loads(json.dumps(block))}, weights

    return make


def read_all(folder):
    """Every weight as floats, as loading reads it. Raises InputError."""
    reader = CheckpointReader(folder)
    config = QuantConfig.from_dict(find_block(folder, reader.config))
    found = {}
    for layer in range(2):
        for local in SHAPES:
            module = f"model.layers.{layer}.{local}"
            names = tensor_names(module, layout_of(config), reader.entries)
            tensors = {field: reader.get(name) for field, name in names.items()}
            found[module] = decode_dense(module, tensors, config).weight_NK
            if found[module].shape != SHAPES[local]:
                raise CheckpointError(module, "config.json states another shape")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_format_definition(kind, model_of, write_folder):
    tensors, config, weights = model_of(kind)
    folder = write_folder(tensors, config)
    found = read_all(folder)
    assert found.keys() == weights.keys()
    for module, weight in weights.items():
        assert torch.equal(found[module], weight), module
    inspection = inspect_checkpoint(folder)
    assert inspection.problems == ()
    assert inspection.loads_in[0].answer in ("yes", "slow")


def damage(number, tensors, config):
    """One of 20 kinds of damage, or None: this kind of file has nothing that it could hit."""
    block = config[BLOCK]
    codes = next(name for name in tensors if name.startswith(Q0) and "_scale" not in name)
    scales = f"{Q0}.weight_scale"
    extra = [n for n in tensors if n.startswith(Q0) and n not in (codes, scales)]
    scale = tensors[scales]
    nan = float("nan")
    wrong_scale = torch.full_like(scale, 255) if scale.dtype == torch.uint8 else None
    if wrong_scale is None:
        wrong_scale = torch.full(scale.shape, nan).to(scale.dtype)
    match number:
        case 0:
            del tensors[codes]
        case 1:
            del tensors[scales]
        case 2:
            tensors[codes] = tensors[codes][:-1].clone()
        case 3:
            tensors[codes] = tensors[codes][:, :-1].clone()
        case 4:
            tensors[codes] = tensors[codes].view(torch.uint8).to(torch.int64)
        case 5:
            tensors[codes] = tensors[codes].flatten().clone()
        case 6:
            tensors[scales] = wrong_scale
        case 7:
            tensors[scales] = torch.ones(3, 5, dtype=torch.float32)
        case 8:
            tensors[scales] = torch.ones(7, 3, 2, dtype=torch.int32)
        case 9:
            tensors[scales] = torch.zeros(0)
        case 10:
            config[BLOCK] = [block]
        case 11:
            block["quant_method"] = 7
        case 12:
            for key in ("quant_algo", "global_quant_config", "config_groups", "bits"):
                block.pop(key, None)
        case 13:
            for key in ("quant_algo", "global_quant_config", "config_groups", "data_type"):
                if key in block:
                    block[key] = ["x"]
        case 14:
            for key in ("ignore", "exclude", "extra_config"):
                block[key] = 3
        case 15:
            for name in extra:
                tensors[name] = torch.full((2, 3), nan)
            if not extra:
                tensors[codes] = tensors[codes][:0].clone()
        case 16:
            for name in extra:
                tensors[name] = torch.zeros(0)
            if not extra:
                tensors[scales] = scale[..., None].clone()
        case 17:
            block |= {"quant_algo": "NVFP4_SVD", "packing_format": "auto_round:other"}
            block |= {"format": "of nobody", "export": {"pack_method": "other"}}
        case 18:
            block |= {"kv_cache_quant_algo": "NVFP4", "kv_cache_quant_config": {"*": 1}}
            block |= {"kv_cache_scheme": {"num_bits": 3}, "bits": 3}
            block["export"] = {"weight_format": "fake_quantized"}
        case 19:
            for key in ("group_size",):
                block[key] = "x"
            for values in (
                block.get("global_quant_config"),
                *block.get("config_groups", {}).values(),
            ):
                for each in ("weight", "weights"):
                    if isinstance(values, dict) and isinstance(values.get(each), dict):
                        values[each]["group_size"] = {"a": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_each_of_twenty_damages_gives_one_line_error(
    kind, float_model, model_of, tmp_path, write_folder
):
    """Loading is refused with one line, and `inspect` reports an error; neither has a traceback."""
    silent = []
    tensors, config, _ = model_of(kind)
    folder = write_folder(tensors, config)
    file, config_file = folder / "model.safetensors", folder / "config.json"
    whole, text = file.read_bytes(), config_file.read_text()
    for number in range(20):
        state, changed = dict(tensors), json.loads(text)
        damage(number, state, changed)
        save_file(state, file, metadata={"format": "pt"})
        config_file.write_text(json.dumps(changed))
        found = inspect_checkpoint(folder)
        try:
            read_all(folder)
        except InputError as error:
            assert "\n" not in str(error)
            assert not found.ok, (number, str(error))
        else:
            silent.append(number)
    file.write_bytes(whole)
    # of the keys that these change, files of this kind have none, or need none
    assert set(silent) <= {17, 18, 19}, silent


@pytest.mark.parametrize(
    ("kind", "target", "scheme"),
    [
        ("modelopt-fp8", "compressed-tensors", "w8a8-fp8-static"),
        ("mxfp8", "compressed-tensors", "w8a16-mxfp8"),
        ("mxfp6", "gptq", "w8a16-sym-g32"),
        ("mxfp6", "compressed-tensors", "w8a16-sym-g32"),
        ("quark-int4", "compressed-tensors", "w4a16-sym-g32"),
    ],
)
def test_lossless_forms(kind, target, scheme, model_of, write_folder, tmp_path):
    tensors, config, weights = model_of(kind)
    folder = write_folder(tensors, config)
    convert_checkpoint(folder, tmp_path / "new", target)
    found = read_all(tmp_path / "new")
    assert all(torch.equal(found[module], weight) for module, weight in weights.items())
    assert inspect_checkpoint(tmp_path / "new").scheme == scheme


@pytest.mark.parametrize(
    ("kind", "target", "lost"),
    [
        ("modelopt-awq", "gptq", "its inputs are multiplied by pre_quant_scale"),
        ("modelopt-nvfp4", "compressed-tensors", "its activations are 4-bit float"),
        ("auto-round-mxfp8", "compressed-tensors", "its activations are 8-bit float"),
        ("auto-round-mxfp8", "gptq", "which conversion cannot preserve .quantize the float model"),
        ("mxfp8", "gptq", "stores integer codes"),
    ],
)
def test_lossy_conversion_is_refused_with_reason(
    kind, target, lost, model_of, write_folder, tmp_path
):
    tensors, config, _ = model_of(kind)
    folder = write_folder(tensors, config)
    with pytest.raises(InputError, match=lost):
        convert_checkpoint(folder, tmp_path / "new", target)
    assert not (tmp_path / "new").exists()


def test_global_scale_multiplier_converts_to_divisor_only_if_exact():
    """A power of two has an exact inverse; most numbers have none."""
    spec = Scheme.parse("w4a16-nvfp4").weight
    fields = {"bytes_NB": random_bytes(8, 16), "scales_NG": float8(8, 2, seed=1), "spec": spec}
    exact = Fp4Weight(**fields, global_scale=None, global_factor=torch.tensor(2.0**-7))
    assert torch.equal(exact.with_divisor().dequantize(), exact.dequantize())
    assert exact.with_divisor().global_scale == 128
    refused = 0
    for factor in (torch.arange(1, 41) / 37).unbind():
        weight = Fp4Weight(**fields, global_scale=None, global_factor=factor)
        try:
            assert torch.equal(weight.with_divisor("x").dequantize(), weight.dequantize())
        except CheckpointError as error:
            assert "x: its global scale" in str(error) and "2^23" in str(error)
            refused += 1
    assert 0 < refused < 40


def test_every_e8m0_exponent_round_trips():
    exponents = torch.arange(255).to(torch.uint8)
    scales = powers_of_two(exponents)
    assert scales.tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert torch.equal(exponents_of(scales), exponents)
    with pytest.raises(CheckpointError, match="NaN"):
        powers_of_two(torch.tensor([255], dtype=torch.uint8))
    with pytest.raises(CheckpointError, match="not powers of two"):
        exponents_of(torch.tensor([3.0]))


@pytest.mark.parametrize(
    ("layout", "tensors_of", "bits"),
    [("mxfp8-quantized", mxfp8, 8), ("mxfp6-pack-quantized", mxfp6, 6)],
)
def test_mx_decode_equals_library(layout, tensors_of, bits):
    library = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor

    tensors, _ = tensors_of(64, 96)
    block = compressed(bits, layout)
    theirs = library.QuantizationConfig.model_validate(block).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(layout)
    restored = compressor.decompress(dict(tensors), theirs)["weight"]
    scheme = QuantConfig.from_dict(block).scheme
    weight = compressed_tensors.decode(tensors, scheme)
    assert torch.equal(weight.dequantize(restored.dtype), restored)
    if bits == 8:  # and what we write is what the library takes for this format
        written = QuantConfig.of_modules("compressed-tensors", {"a": scheme}).to_dict()
        own = library.QuantizationConfig.model_validate(written).config_groups["group_0"]
        assert compressor.can_compress(torch.nn.Linear, own)
        assert written["format"] == layout


def w4a4(weight_bits=4):
    weights = {"num_bits": weight_bits, "type": "int", "strategy": "group", "group_size": 32}
    inputs = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def test_four_bit_activations_need_user_consent_to_run_wider():
    config = QuantConfig.from_dict(w4a4())
    assert str(config.scheme) == "w4a4-sym-g32-int4-dynamic-token"
    with pytest.raises(CheckpointError, match="4-bit integer activations.*--activation-bits 8 or"):
        config.with_activation_bits(None)
    assert str(config.with_activation_bits(8).scheme) == "w4a8-g32"
    wide = config.with_activation_bits(16)
    assert str(wide.scheme) == "w4a16-sym-g32" and wide.unrounded_inputs == "4-bit int"
    plain = QuantConfig.from_dict(compressed(8, "mxfp8-quantized"))
    assert plain.with_activation_bits(None) is plain
    with pytest.raises(InputError, match="--activation-bits: expected only with a checkpoint"):
        plain.with_activation_bits(8)


def test_unsupported_algorithms_are_refused_by_name():
    for block, text in (
        (modelopt("NVFP4_SVD"), "SVDQuant"),
        (modelopt("W4A8_AWQ"), "a second time"),
        (modelopt("OTHER"), "expected one of FP8"),
        (quark([MX4, MX4]), "has 2 rounding steps"),
        (quark({"dtype": "mx9", "qscheme": "per_group"}), "found 'mx9'"),
        ({**AUTO_ROUND, "packing_format": "auto_round:llm_compressor_nvfp4_e5m3"}, "expected one"),
    ):
        with pytest.raises(CheckpointError, match=text) as caught:
            QuantConfig.from_dict(block)
        assert "\n" not in str(caught.value)


def test_modelopt_group_size_is_read_from_its_own_file(model_of, write_folder):
    """config.json of 4-bit integers does not state it."""
    tensors, config, weights = model_of("modelopt-awq")
    del config[BLOCK]["group_size"]
    folder = write_folder(tensors, config)
    with pytest.raises(InputError, match="64 inputs are not divisible by the group size 128"):
        read_all(folder)
    own = {"quantization": {"quant_algo": "W4A16_AWQ", "group_size": 32}}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    assert torch.equal(read_all(folder)[Q0], weights[Q0])
    # and where config.json has no block, that file is the only one
    del config[BLOCK]
    (folder / "config.json").write_text(json.dumps(config))
    own["quantization"]["exclude_modules"] = ["lm_head"]
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    reader = CheckpointReader(folder)
    quant = QuantConfig.from_dict(find_block(folder, reader.config))
    assert str(quant.scheme) == "w4a16-sym-g32" and quant.scheme_for("lm_head") is None


def test_modelopt_mixed_precision_layer_schemes():
    layers = {
        Q0: {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1.mlp*": {"quant_algo": "FP8"},
    }
    config = QuantConfig.from_dict(modelopt("MIXED_PRECISION", quantized_layers=layers))
    assert str(config.scheme_for(Q0)) == "w4a16-nvfp4"
    assert str(config.scheme_for("model.layers.1.mlp.up_proj")) == "w8a8-fp8-static"
    assert config.scheme_for("model.layers.0.mlp.up_proj") is None


def test_mxfp8_golden_bytes():
    """As formats/README.md has them: an exponent of 126, and three float8 bytes."""
    codes = torch.tensor([[0x38, 0x40, 0xB8] + [0] * 29], dtype=torch.uint8)
    tensors = {
        "weight": codes.view(torch.float8_e4m3fn),
        "weight_scale": torch.tensor([[126]], dtype=torch.uint8),
    }
    weight = compressed_tensors.decode(tensors, Scheme(weight=MXFP8))
    assert weight.dequantize()[0, :3].tolist() == [0.5, 1.0, -0.5]
    assert torch.equal(compressed_tensors.encode(weight)["weight_scale"], tensors["weight_scale"])
