"""Loading rules for compressed-tensors, AutoRound's own block and native float8.

Versions as in rules.py.
"""

from formats.compatibility.loads_in import Rule
from formats.compatibility.terms import (
    LIBRARY,
    MARLIN_GROUPS,
    OTHERS,
    SERVERS,
    SGLANG,
    SGLANG_SOURCE,
    SHAPE_OF_ZEROS,
    TRANSFORMERS,
    VLLM,
    VLLM_COMPRESSED,
    VLLM_SOURCE,
    any_expert,
    any_scheme,
    gptq_bits,
    groups,
    has_other_input_groups,
    has_packed_embedding,
    has_quantized_head,
    is_w4a8,
    packed_asymmetric,
    row,
    shares_packed_table,
    trait,
    when,
)
from formats.scheme import CHANNEL, FP4_TYPES, MXFP8, Scheme


def _needs_humming(scheme: Scheme) -> bool:
    """Return True for integer weights of other bits than 4 and 8, with inputs of 16 bits."""
    weight = scheme.weight
    return weight.type == "int" and weight.bits not in (4, 8) and scheme.activation is None


COMPRESSED_RULES: tuple[Rule, ...] = (
    # compressed-tensors
    row(
        "ct-actorder",
        OTHERS,
        "no",
        when(lambda f: f.config.act_order, "refuses an actorder that regroups inputs"),
        f"{VLLM_COMPRESSED} _quantization_scheme_map_from_config; {LIBRARY}: removed since 0.19",
        "compressed-tensors",
    ),
    row(
        "ct-weight-zeros",
        SERVERS,
        "no",
        trait("weight zeros", "cannot load zeros of symmetric weights"),
        f"{VLLM_SOURCE}/compressed_tensors/schemes/compressed_tensors_wNa16.py",
        "compressed-tensors",
    ),
    row(
        "ct-embedding-vllm",
        VLLM,
        "yes",
        when(
            has_packed_embedding,
            "a packed input embedding of integer codes since June 2026, in some families only",
        ),
        "vllm-project/vllm pull request 44340, issue 54304",
        "compressed-tensors",
    ),
    row(
        "ct-tied-embedding-vllm",
        VLLM,
        "no",
        when(
            shares_packed_table,
            "cannot use a packed input embedding as the head: --quantize-head gives it one of its"
            " own",
        ),
        "vllm-project/vllm pull request 45535, which is not merged",
        "compressed-tensors",
    ),
    row(
        "ct-head-vllm",
        VLLM,
        "yes",
        when(has_quantized_head, "a quantized head since March 2026"),
        "vllm-project/vllm pull request 37291",
        "compressed-tensors",
    ),
    row(
        "ct-head-sglang",
        SGLANG,
        "yes",
        when(has_quantized_head, "a quantized head since August 2026, where a target names it"),
        "sgl-project/sglang pull request 35228, issue 35358",
        "compressed-tensors",
    ),
    row(
        "ct-embedding-sglang",
        SGLANG,
        "no",
        when(has_packed_embedding, "ignores a packed input embedding and computes garbage"),
        "sgl-project/sglang issue 38143, pull requests 36137 and 38224, open in September 2026",
        "compressed-tensors",
    ),
    row(
        "ct-embedding-transformers",
        TRANSFORMERS,
        "no",
        when(has_packed_embedding, "does not read a packed input embedding"),
        "transformers 5.23.0 with compressed-tensors 0.20.0, run",
        "compressed-tensors",
    ),
    row(
        "ct-int8-kv-vllm",
        VLLM,
        "no",
        when(
            lambda f: f.config.kv_cache == "int8",
            "refuses the kv_cache_scheme: its 8-bit KV cache is float8",
        ),
        f"{VLLM_COMPRESSED} validate_kv_cache_scheme, 0.25.1 to 0.33.0",
        "compressed-tensors",
    ),
    row(
        "ct-heads-kv-vllm",
        VLLM,
        "yes",
        when(
            lambda f: f.config.kv_cache == "fp8" and f.config.kv_per_head,
            "a KV scale for each head needs FlashAttention 3, and so a GPU of compute capability 9",
        ),
        f"{VLLM_COMPRESSED} CompressedTensorsKVCacheMethod, vllm-project/vllm pull request 30141",
        "compressed-tensors",
    ),
    row(
        "ct-heads-kv-sglang",
        SGLANG,
        "no",
        when(
            lambda f: f.config.kv_cache == "fp8" and f.config.kv_per_head,
            "reads only one KV scale per layer",
        ),
        "sglang/srt/layers/quantization/kv_cache.py of September 2026",
        "compressed-tensors",
    ),
    row(
        "ct-int8-kv-sglang",
        SGLANG,
        "yes",
        when(
            lambda f: f.config.kv_cache == "int8",
            "ignores the scales: its 8-bit KV cache is float8",
        ),
        f"{SGLANG_SOURCE}/compressed_tensors/compressed_tensors.py is_supported_scheme",
        "compressed-tensors",
    ),
    row(
        "ct-humming",
        VLLM,
        "yes",
        when(
            lambda f: any(
                s.weight.type == "int"
                and (s.weight.bits not in (4, 8) or s.weight.group_size not in MARLIN_GROUPS)
                and s.activation is None
                for s in f.schemes
            ),
            "by its Humming kernel (CUDA, sm75 and later), included in the wheel",
        ),
        f"{VLLM_SOURCE}/compressed_tensors/schemes/compressed_tensors_wNa16.py,"
        " vllm/model_executor/kernels/linear/mixed_precision/humming.py",
        "compressed-tensors",
    ),
    row(
        "ct-humming-zeros",
        VLLM,
        "yes",
        any_scheme(
            lambda s: _needs_humming(s) and not s.weight.symmetric,
            "zero points of other bits than 4 and 8 from 0.31 on (not in 0.29)",
        ),
        f"{VLLM_SOURCE}/compressed_tensors/schemes/compressed_tensors_wNa16.py, 0.29.0 and 0.31.0:"
        " WNA16_ZP_SUPPORTED_TYPES_MAP",
        "compressed-tensors",
    ),
    row(
        "ct-humming-experts",
        VLLM,
        "yes",
        any_expert(_needs_humming, "experts of other bits than 4 and 8 from 0.29 on (not in 0.25)"),
        f"{VLLM_SOURCE}/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_wna16.py"
        " of 0.25.1, 0.29.0, 0.31.0 and 0.33.0",
        "compressed-tensors",
    ),
    row(
        "ct-experts-channel",
        VLLM,
        "no",
        any_expert(
            lambda s: _needs_humming(s) and s.weight.group_size == CHANNEL,
            "loads experts of other bits than 4 and 8 in groups, not with one scale per output",
        ),
        f"{VLLM_SOURCE}/compressed_tensors/compressed_tensors_moe/"
        "compressed_tensors_moe_wna16.py of 0.33.0: other kernels than Marlin need groups",
        "compressed-tensors",
    ),
    row(
        "ct-bits-sglang",
        SGLANG,
        "no",
        any_scheme(
            lambda s: s.weight.type == "int" and s.weight.bits not in (4, 8),
            "takes 4 and 8 bits",
        ),
        f"{SGLANG_SOURCE}/compressed_tensors/schemes/compressed_tensors_wNa16.py",
        "compressed-tensors",
    ),
    row(
        "ct-groups-sglang",
        SGLANG,
        "no",
        groups("takes groups of 32, 64, 128 or -1, not {}"),
        f"{SGLANG_SOURCE}/marlin_utils.py",
        "compressed-tensors",
    ),
    row(
        "ct-w4a8-int",
        VLLM,
        "yes",
        any_scheme(
            lambda s: is_w4a8(s, "int"),
            "pack-quantized from 0.29 on (not in 0.25), by its Humming kernel",
        ),
        f"{VLLM_COMPRESSED} _is_wNaM_int, CompressedTensorsWNA8Int of 0.29.0 and 0.33.0",
        "compressed-tensors",
    ),
    row(
        "ct-w4a8-fp8",
        VLLM,
        "yes",
        any_scheme(
            lambda s: is_w4a8(s, "float"),
            "only on Hopper (sm_90), in groups of 128, from 0.25 on",
        ),
        f"{VLLM_COMPRESSED} _is_fp8_w4a8_sm90, CompressedTensorsW4A8Fp8 of 0.25.1 to 0.33.0",
        "compressed-tensors",
    ),
    row(
        "ct-w4a8-fp8-groups",
        VLLM,
        "no",
        any_scheme(
            lambda s: is_w4a8(s, "float") and s.weight.group_size != 128,
            "takes 4-bit weights with float8 activations in groups of 128 only",
        ),
        f"{VLLM_SOURCE}/compressed_tensors/schemes/compressed_tensors_w4a8_fp8.py",
        "compressed-tensors",
    ),
    row(
        "ct-w4a8-bytes",
        VLLM,
        "no",
        trait(
            "codes in bytes",
            "runs 4-bit codes with 8-bit inputs on CUDA only where they are packed"
            " (pack-quantized), not as int8: converting to compressed-tensors packs them",
        ),
        f"{VLLM_COMPRESSED} _get_scheme_from_parts of 0.33.0: CompressedTensorsW4A8Int has kernels"
        " for CPUs and Intel GPUs; CompressedTensorsW4A8Fp8 has weight_packed",
        "compressed-tensors",
    ),
    row(
        "ct-w4a8-sglang",
        SGLANG,
        "no",
        any_scheme(
            lambda s: is_w4a8(s, "int") or is_w4a8(s, "float"),
            "takes 8-bit activations with 4-bit weights in experts only",
        ),
        f"{SGLANG_SOURCE}/compressed_tensors/compressed_tensors.py _get_scheme_from_parts",
        "compressed-tensors",
    ),
    row(
        "ct-block-input-groups",
        SERVERS,
        "yes",
        any_scheme(
            has_other_input_groups,
            "rounds inputs in groups as long as the blocks of the weights, not as the file says",
        ),
        f"{VLLM_SOURCE}/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py"
        f" act_q_group_shape; {SGLANG_SOURCE}/fp8_utils.py, groups of block_size[1]",
        "compressed-tensors",
    ),
    # AutoRound's own block, and the native float8 one
    row(
        "auto-round-packing",
        SERVERS,
        "no",
        lambda f: (
            f"takes the packings auto_gptq and auto_awq, not {f.packing}"
            if f.packing in ("auto_round", "auto_round:gptqmodel")
            else ""
        ),
        f"{VLLM_SOURCE}/inc/inc.py and {SGLANG_SOURCE}/auto_round.py SUPPORTED_FORMATS",
        "auto-round",
    ),
    row(
        "auto-round-bits",
        VLLM,
        "no",
        when(lambda f: f.config.layout == "gptq" and gptq_bits(f), "takes symmetric 4 and 8 bits"),
        f"{VLLM_SOURCE}/inc/schemes/inc_wna16_linear.py gptq_type_map",
        "auto-round",
    ),
    row(
        "auto-round-bits-sglang",
        SGLANG,
        "no",
        any_scheme(lambda s: s.weight.bits not in (2, 3, 4, 8), "takes 2, 3, 4 and 8 bits"),
        f"{SGLANG_SOURCE}/auto_round.py SUPPORTED_BITS",
        "auto-round",
    ),
    row(
        "auto-round-transformers",
        TRANSFORMERS,
        "yes",
        lambda f: "with auto-round installed",
        "transformers/quantizers/quantizer_auto_round.py of 5.23.0",
        "auto-round",
    ),
    row(
        "fp8-transformers",
        TRANSFORMERS,
        "yes",
        lambda f: "with accelerate installed; as bfloat16 on a GPU without float8",
        "transformers/quantizers/quantizer_finegrained_fp8.py of 5.23.0",
        "fp8",
    ),
    row(
        "ct-fp8",
        SERVERS,
        "yes",
        any_scheme(
            lambda s: s.weight.type == "float" and s.activation is not None,
            "8-bit products on sm89 and later, else 16-bit activations",
        ),
        f"{VLLM_COMPRESSED} CompressedTensorsW8A8Fp8.get_min_capability",
        "compressed-tensors",
        "fp8",
    ),
    row(
        "ct-experts-w8a8",
        TRANSFORMERS,
        "no",
        any_expert(
            lambda s: s.weight.type == "int" and s.weight.bits == 8 and s.activation is not None,
            "fails to merge experts stored as int8 codes",
        ),
        "transformers 5.23.0 with compressed-tensors 0.20.0, Qwen3-MoE, run",
        "compressed-tensors",
    ),
    row(
        "ct-experts-mixed",
        TRANSFORMERS,
        "no",
        lambda f: (
            f.mixed_experts(in_all_layers=True)
            and "reads all experts of the model in one scheme: fails on others, or fills experts"
            " in float with random numbers"
        ),
        "transformers 5.23.0 with compressed-tensors 0.20.0, Qwen3-MoE, run; get_experts_scheme of"
        " transformers/integrations/compressed_tensors.py",
        "compressed-tensors",
    ),
    row(
        "ct-experts-mxfp8",
        TRANSFORMERS,
        "no",
        any_expert(lambda s: s.weight == MXFP8, "fails to dequantize experts in MXFP8"),
        "transformers 5.23.0 with compressed-tensors 0.20.0, Qwen3-MoE, run",
        "compressed-tensors",
    ),
    row(
        "ct-experts-nvfp4",
        TRANSFORMERS,
        "no",
        any_expert(
            lambda s: s.weight.type == "nvfp4",
            "loads NVFP4 experts and computes garbage from them",
        ),
        "transformers 5.23.0 with compressed-tensors 0.20.0, Qwen3-MoE, run: logits off by 136 %",
        "compressed-tensors",
    ),
    row(
        "ct-bfloat16",
        TRANSFORMERS,
        "yes",
        any_scheme(
            lambda s: s.weight.type in FP4_TYPES or s.weight == MXFP8,
            "in bfloat16 only, to which the library dequantizes: a forward pass in float16 fails",
        ),
        "transformers 5.23.0 with compressed-tensors 0.20.0, Llama of llm-compressor, run",
        "compressed-tensors",
    ),
    row(
        "ct-experts-asymmetric",
        TRANSFORMERS,
        "no",
        any_expert(
            lambda s: s.weight.type == "int" and not s.weight.symmetric and s.activation is None,
            "fails on experts with zero points, dequantized or not",
        ),
        "transformers 5.23.0 with compressed-tensors 0.20.0, Qwen3-MoE, run",
        "compressed-tensors",
    ),
    row(
        "ct-packed-asymmetric-mixed",
        TRANSFORMERS,
        "no",
        when(
            lambda f: packed_asymmetric(f) and len(set(f.schemes)) > 1,
            SHAPE_OF_ZEROS,
        ),
        LIBRARY,
        "compressed-tensors",
    ),
    row(
        "ct-packed-asymmetric",
        TRANSFORMERS,
        "slow",
        when(
            packed_asymmetric,
            f"as float, with CompressedTensorsConfig(dequantize=True): else {SHAPE_OF_ZEROS}",
        ),
        LIBRARY,
        "compressed-tensors",
    ),
    row(
        "ct-mxfp4-sglang",
        SGLANG,
        "no",
        any_scheme(lambda s: s.weight.type == "mxfp4", "has no dense MXFP4 linears in this format"),
        f"{SGLANG_SOURCE}/compressed_tensors/compressed_tensors.py _get_scheme_from_parts",
        "compressed-tensors",
    ),
    row(
        "ct-transformers",
        TRANSFORMERS,
        "yes",
        lambda f: "with compressed-tensors installed",
        LIBRARY,
        "compressed-tensors",
    ),
)
