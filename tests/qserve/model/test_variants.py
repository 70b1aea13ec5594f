"""Every variant that we read runs: logits against the same weights dequantized.

The checkpoints are the tiny random models of tests/conftest.py in each scheme and format.
"""

import json
import logging

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from formats.convert import convert_checkpoint
from formats.errors import InputError
from formats.quant_config import BLOCK
from formats.scheme import Scheme
from qserve.llm import LLM
from tests.qserve.model.variants import TOKENS, edited, logits

PAIRS = [
    ("w4a16-sym-g32", "gptq"),
    ("w4a16-sym-g32", "awq"),
    ("w4a16-asym-g32", "awq"),
    ("w4a16-asym-g32", "gptq"),
    ("w4a16-asym-g32", "compressed-tensors"),
    ("w3a16-sym-g32", "gptq"),
    ("w2a16-asym-g32", "gptq"),
    ("w8a16-sym-g32", "compressed-tensors"),
    ("w8a8", "compressed-tensors"),
    ("w8a8", "gptq"),
    ("w8a8-static", "compressed-tensors"),
    ("w8a8-fp8", "compressed-tensors"),
    ("w8a8-fp8-static", "compressed-tensors"),
    ("w8a8-fp8-block", "compressed-tensors"),
    ("w8a16-fp8", "compressed-tensors"),
]


@pytest.mark.parametrize(("scheme", "output_format"), PAIRS)
def test_logits_are_close_to_float_model(written, tiny_model, scheme, output_format):
    found, want = logits(written(scheme, output_format)), logits(tiny_model("llama"))
    error = float((found - want).norm() / want.norm())
    # a random model amplifies rounding, and float8 has only three bits of it
    limit = {"w2": 1.1, "w3": 0.85, "w4": 0.45, "w8": 0.15}[scheme[:2]]
    assert error < (0.35 if "static" in scheme or "fp8" in scheme else limit), error


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_same_codes_in_another_format_give_the_same_logits(written, family):
    first = logits(written("w4a16-sym-g32", "gptq", family))
    for output_format in ("awq", "compressed-tensors"):
        assert torch.equal(logits(written("w4a16-sym-g32", output_format, family)), first)
    int8 = logits(written("w8a8", "gptq", family))
    assert torch.equal(logits(written("w8a8", "compressed-tensors", family)), int8)


def reorder(state, name, group=32):
    """Shuffle the inputs of a GPTQ linear's groups, as act-order does, without changing W."""
    from formats.codecs import gptq
    from formats.scheme import QuantSpec

    spec = QuantSpec(bits=4, symmetric=True, group_size=group)
    tensors = {field: state[f"{name}.{field}"] for field in gptq.TENSOR_NAMES}
    codes = gptq.decode(tensors, spec).codes()
    order = torch.randperm(codes.shape[1], generator=torch.Generator().manual_seed(len(name)))
    shuffled = torch.empty_like(codes)
    shuffled[:, order] = codes
    from formats.numerics.bits import pack

    state[f"{name}.qweight"] = pack(shuffled, 4).t().contiguous()
    g_idx = torch.empty(len(order), dtype=torch.int32)
    g_idx[order] = torch.arange(len(order), dtype=torch.int32) // group
    state[f"{name}.g_idx"] = g_idx
    return order


def test_act_order_follows_g_idx(written, transformers_model, tmp_path):
    """q, k and v are ordered differently, so they cannot be one matrix."""
    names = ["self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "mlp.up_proj"]

    def shuffle(state):
        for name in names:
            reorder(state, f"model.layers.1.{name}")

    folder = edited(
        written("w4a16-sym-g32", "gptq"),
        tmp_path / "x",
        shuffle,
        config=lambda c: c[BLOCK].update(desc_act=True),
    )
    with torch.no_grad():
        want = transformers_model(folder)(torch.tensor([TOKENS])).logits[0]
    assert not torch.allclose(want, logits(written("w4a16-sym-g32", "gptq")), atol=0.1)
    torch.testing.assert_close(logits(folder), want, rtol=1e-3, atol=1e-3)


def test_mislabelled_qzeros_load_correctly_and_are_reported(written, tmp_path, caplog):
    source = written("w4a16-sym-g32", "gptq")
    folder = edited(
        source, tmp_path / "x", config=lambda c: c[BLOCK].update(checkpoint_format="gptq_v2")
    )
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(folder), logits(source))
    assert (
        "checkpoint_format states v2 zeros, but the data of 21 linears contradicts" in caplog.text
    )


def test_ambiguous_qzeros_are_refused(written, tmp_path):
    def spoil(state):
        state["model.layers.0.mlp.up_proj.qzeros"].fill_(-1)

    folder = edited(
        written("w4a16-asym-g32", "gptq"),
        tmp_path / "x",
        spoil,
        lambda c: c[BLOCK].update(checkpoint_format="gptq"),
    )
    with pytest.raises(InputError, match="layers.0.mlp.up_proj.*does not say which"):
        logits(folder)


def test_ignored_and_overridden_linears_run_in_every_format(written, tiny_model):
    options = {
        "ignore": ("layers.0.mlp.",),
        "overrides": [("o_proj", Scheme.parse("w8a16-sym-g32"))],
    }
    want = None
    for output_format in ("gptq", "compressed-tensors"):
        found = logits(written("w4a16-sym-g32", output_format, **options))
        want = found if want is None else want
        assert torch.equal(found, want)
    float_model = logits(tiny_model("llama"))
    plain = logits(written("w4a16-sym-g32", "gptq"))
    assert (want - float_model).norm() < (plain - float_model).norm()


def test_part_of_a_fused_matrix_may_be_float_where_the_config_says_so(written, tmp_path):
    name = "model.layers.0.self_attn.q_proj"
    source = written("w4a16-sym-g32", "gptq")

    def dequantize(state):
        from formats.codecs import gptq
        from formats.scheme import QuantSpec

        spec = QuantSpec(bits=4, symmetric=True, group_size=32)
        tensors = {field: state.pop(f"{name}.{field}") for field in gptq.TENSOR_NAMES}
        state[f"{name}.weight"] = gptq.decode(tensors, spec).dequantize()

    with pytest.raises(InputError, match="run as one matrix, but only .* is quantized"):
        logits(edited(source, tmp_path / "x", dequantize))
    folder = edited(
        source,
        tmp_path / "y",
        dequantize,
        lambda c: c[BLOCK].update(dynamic={r"-:.*layers\.0\.self_attn\.q_proj": {}}),
    )
    torch.testing.assert_close(logits(folder), logits(source), rtol=1e-4, atol=1e-4)


def test_modules_in_block_to_quantize_names_what_is_quantized(written, tmp_path):
    source = written("w4a16-sym-g32", "gptq")
    listed = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]
    folder = edited(
        source,
        tmp_path / "x",
        config=lambda c: c[BLOCK].update(modules_in_block_to_quantize=listed),
    )
    with pytest.raises(InputError, match="leaves it in float"):
        logits(folder)
    listed.append(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"])
    folder = edited(
        source,
        tmp_path / "y",
        config=lambda c: c[BLOCK].update(modules_in_block_to_quantize=listed),
    )
    assert torch.equal(logits(folder), logits(source))


def test_quantized_head_and_config_in_a_second_file(written, tmp_path):
    from formats.codecs import gptq
    from formats.in_memory.packed import PackedWeight

    source = written("w4a16-sym-g32", "gptq")
    heads = {}

    def quantize_head(state):
        weight = state.pop("lm_head.weight")
        packed = PackedWeight.from_float(weight, Scheme.parse("w4a16-sym-g32").weight)
        heads["weight"] = packed.dequantize()
        state.update({f"lm_head.{field}": t for field, t in gptq.encode(packed).items()})

    blocks = []
    folder = edited(source, tmp_path / "x", quantize_head, lambda c: blocks.append(c.pop(BLOCK)))
    del blocks[0]["quant_method"]  # AutoGPTQ's file has none
    blocks[0]["lm_head"] = True
    (folder / "quantize_config.json").write_text(json.dumps(blocks[0]))
    dequantized = edited(
        source, tmp_path / "y", lambda s: s.update({"lm_head.weight": heads["weight"]})
    )
    torch.testing.assert_close(logits(folder), logits(dequantized), rtol=1e-4, atol=1e-4)


def test_kv_scales_are_read_and_checked(written, tmp_path):
    def scales(value):
        def change(state):
            for layer in range(3):
                state[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor([value])
                state[f"model.layers.{layer}.self_attn.v_proj.v_scale"] = torch.tensor(0.5)

        return change

    def scheme(config):
        config[BLOCK]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}

    source = written("w8a8", "compressed-tensors")
    folder = edited(source, tmp_path / "x", scales(0.25), scheme)
    decoder = LLM(folder, device="cpu", max_model_len=64).engine.runner.decoder
    assert [float(layer.attention.k_scale) for layer in decoder.layers] == [0.25] * 3
    assert [float(layer.attention.v_scale) for layer in decoder.layers] == [0.5] * 3
    assert not torch.equal(logits(folder), logits(source)), "the cache is rounded with them"
    for number, bad in enumerate((0.0, float("nan"), -1.0)):
        with pytest.raises(InputError, match="k_scale: expected one finite number above 0"):
            logits(edited(source, tmp_path / str(number), scales(bad), scheme))


def test_awq_without_zeros_and_with_old_keys(written, tmp_path):
    source = written("w4a16-sym-g32", "awq")

    def drop_zeros(state):
        for name in [name for name in state if name.endswith("qzeros")]:
            del state[name]

    def old_keys(config):
        config[BLOCK] = {
            "quant_method": "awq",
            "w_bit": 4,
            "q_group_size": 32,
            "zero_point": False,
            "version": "GEMM",
        }

    folder = edited(source, tmp_path / "x", drop_zeros, old_keys)
    assert torch.equal(logits(folder), logits(source))
    convert_checkpoint(folder, tmp_path / "out", "gptq")
    assert torch.equal(logits(tmp_path / "out"), logits(source))


@pytest.mark.parametrize("output_format", ["gptq", "awq", "compressed-tensors"])
def test_padded_feed_forward_computes_the_same(tmp_path, output_format):
    """80 features do not fit groups of 32; the 16 added ones are silu(0) * 0."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        mlp_bias=True,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "float")
    quantize_checkpoint(
        tmp_path / "float",
        tmp_path / "wide",
        scheme=Scheme.parse("w8a16-sym-g32" if output_format != "awq" else "w4a16-sym-g32"),
        output_format=output_format,
        pad=True,
        progress=False,
    )
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["intermediate_size"] == 96
    found, want = logits(tmp_path / "wide"), logits(tmp_path / "float")
    assert (found - want).norm() / want.norm() < (0.45 if output_format == "awq" else 0.03)
