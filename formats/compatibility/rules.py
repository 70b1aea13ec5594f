"""Rules on which program loads what, one row each, with the evidence for each.

Versions: vLLM 0.33.0 (0.25.1 and 0.29.0 where stated), SGLang 0.5.23, transformers 5.23.0 with
optimum 2.3.0, gptqmodel 7.7.0 and compressed-tensors 0.20.0.
"""

from formats.architecture.expert_names import ExpertNames
from formats.architecture.float_linears import of_routing
from formats.architecture.refused import REFUSED
from formats.compatibility.compressed import COMPRESSED_RULES
from formats.compatibility.gptq_awq import GPTQ_AWQ_RULES
from formats.compatibility.loads_in import Facts, Rule, Verdict, judge
from formats.compatibility.others import OTHER_RULES
from formats.compatibility.own import OWN_RULES
from formats.compatibility.terms import (
    OTHERS,
    OURS,
    OWN_SOURCE,
    PROGRAMS,
    SERVERS,
    SGLANG,
    TRANSFORMERS,
    VLLM,
    VLLM_SOURCE,
    row,
    when,
)
from formats.compatibility.vendors import VENDOR_RULES
from formats.families import FAMILIES, served_architectures


def loads_in(facts: Facts) -> list[Verdict]:
    """Return one verdict for each program."""
    return judge(facts, RULES, PROGRAMS)


def _has_delta_nets(facts: Facts) -> bool:
    family = FAMILIES.get(facts.architecture)
    mixer = None if family is None else family.state_mixer
    return mixer is not None and mixer.kind == "gated delta nets"


def _has_quantized_mamba_1(facts: Facts) -> bool:
    family = FAMILIES.get(facts.architecture)
    mixer = None if family is None else family.state_mixer
    if mixer is None or mixer.kind != "Mamba-1":
        return False
    quantized = (linear.name for linear in facts.linears if "float" not in linear.traits)
    return any(mixer.alone or f".{mixer.module}." in name for name in quantized)


def _lacks_class(architecture: str) -> str:
    """Describe how transformers runs a family without a class; "" if it has the class."""
    family = FAMILIES.get(architecture)
    if family is not None and family.defaults_of:
        return f"has no {architecture}; code in the float model's folder computes it"
    if family is None or not family.class_in_transformers:
        return ""
    return f"has no {architecture}: its layers are in {family.class_in_transformers}"


def _unlisted_linear(facts: Facts) -> str:
    """Return a router's linear that the block does not list as float; "" if there is none."""
    family = FAMILIES.get(facts.architecture)
    if family is None or family.experts is None or facts.config is None:
        return ""
    stem = f".{family.experts.stem}."
    prefixes = {each.name.partition(stem)[0] for each in facts.linears if stem in each.name}
    names = (f"{prefix}.{name}" for prefix in prefixes for name in of_routing(family.experts))
    return min((name for name in names if facts.config.scheme_for(name) is not None), default="")


def _renamed_mixtral(facts: Facts, effect: str) -> str:
    """Return which expert names of Mixtral a server does not know; "" if it knows all of them."""
    names = facts.renamed
    if names is None or facts.architecture != "MixtralForCausalLM":
        return ""
    return (
        f"{effect} experts called {names.found} (it looks for {names.expected}):"
        " convert renames them"
    )


def _is_of_another_module(names: ExpertNames | None) -> bool:
    """Return True if experts are below another module than the family's, such as mlp."""
    return names is not None and names.found.split(".")[0] != names.expected.split(".")[0]


RULES: tuple[Rule, ...] = (
    # rules for any format
    row("own-error", OURS, "no", lambda f: f.config_error or f.first_error, OWN_SOURCE),
    row("damaged", OTHERS, "no", lambda f: f.first_error, "what inspection found"),
    row(
        "unreadable",
        OTHERS,
        "not judged",
        lambda f: f.config_error and f"this project cannot read it: {f.config_error}",
        "no rule looks at what is not read",
    ),
    row(
        "refused-family",
        OURS,
        "no",
        lambda f: " ".join(REFUSED.get(f.architecture, ())[:1]),
        OWN_SOURCE,
    ),
    row(
        "no-family",
        OURS,
        "no",
        when(lambda f: not f.architecture, "config.json names no architecture"),
        OWN_SOURCE,
    ),
    row(
        "family",
        OURS,
        "not judged",
        when(
            lambda f: f.architecture not in (*served_architectures(), *REFUSED),
            "`qserve families` does not list it; `serve` runs it through transformers if a check at"
            " the start passes",
        ),
        OWN_SOURCE,
    ),
    row("variant", OURS, "no", lambda f: f.choices.refused, OWN_SOURCE),
    row(
        "activation",
        (OURS, *SERVERS),
        "no",
        lambda f: (
            ""
            if f.choices.activation == f.choices.default_activation
            else f"computes {f.choices.default_activation}, not {f.choices.activation}"
        ),
        "vllm/model_executor/models/llama.py LlamaMLP; SGLang's is alike",
    ),
    row(
        "unplaced",
        OURS,
        "no",
        lambda f: f.unplaced and f"does not expect the tensor {f.unplaced}",
        OWN_SOURCE,
    ),
    row(
        "stacked-experts",
        OTHERS,
        "not judged",
        lambda f: f.stacked and f"may not find experts in one tensor, {f.stacked}; not run here",
        "llm-compressor #2939, #3183: vLLM maps no gate_up_proj_packed, nor transformers",
    ),
    row(
        "second-file-transformers",
        TRANSFORMERS,
        "no",
        lambda f: (
            f.second_file
            and f"does not read {f.second_file}: loads a float model with random weights"
        ),
        "transformers/quantizers/auto.py of 5.23.0, run",
    ),
    row(
        "second-file-servers",
        SERVERS,
        "no",
        lambda f: (
            f.second_file
            and f"reads {f.second_file} only with --quantization: copy it into config.json"
        ),
        "vllm/model_executor/model_loader/weight_utils.py get_quant_config; SGLang's is alike",
    ),
    row(
        "fused-mixed",
        SERVERS,
        "no",
        lambda f: f.fused_mixed and f"loads {f.fused_mixed} as one matrix in one scheme",
        f"{VLLM_SOURCE}/utils/quant_utils.py is_layer_skipped, {VLLM_SOURCE}/utils/gptq_utils.py",
        "gptq",
        "awq",
        "compressed-tensors",
        "auto-round",
        "fp8",
    ),
    row(
        "mixed-experts",
        SERVERS,
        "no",
        lambda f: (
            (module := f.mixed_experts())
            and f"loads all experts of {module} in one scheme, and they differ"
        ),
        f"{VLLM_SOURCE}/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe.py"
        " get_moe_method; SGLang, too, has one tensor for the codes of all experts of a layer",
        "gptq",
        "awq",
        "compressed-tensors",
        "auto-round",
        "fp8",
    ),
    row(
        "renamed-experts",
        TRANSFORMERS,
        "no",
        lambda f: (
            f.renamed
            and f"does not find experts called {f.renamed.found} (it looks for"
            f" {f.renamed.expected}) and fills them with random numbers: convert renames them"
        ),
        "transformers/conversion_mapping.py of 5.23.0, run",
    ),
    row(
        "renamed-experts-vllm",
        VLLM,
        "no",
        lambda f: _renamed_mixtral(f, "does not find") if _is_of_another_module(f.renamed) else "",
        "vllm/model_executor/models/mixtral.py of 0.33.0: hf_to_vllm_mapper renames linears alone",
    ),
    row(
        "renamed-experts-sglang",
        SGLANG,
        "no",
        lambda f: _renamed_mixtral(f, "computes garbage, since it ignores"),
        "sglang/srt/models/mixtral.py of 0.5.23: load_weights warns of names that it does not know",
    ),
    row(
        "granite-experts",
        TRANSFORMERS,
        "no",
        when(
            lambda f: f.architecture.startswith("GraniteMoe") and f.config is not None,
            "looks for one float tensor of all experts, and fills it with random numbers",
        ),
        "transformers 5.23.0 and compressed-tensors, run on granitemoe",
    ),
    row(
        "vision-experts",
        TRANSFORMERS,
        "no",
        when(
            lambda f: f.whole.startswith("Qwen3VLMoe") and f.has_quantized_experts,
            "looks for float tensors of all experts of a layer, and fills them with random numbers",
        ),
        "transformers 5.23.0 and compressed-tensors, run on qwen3_vl_moe",
    ),
    row(
        "media-experts",
        TRANSFORMERS,
        "no",
        when(
            lambda f: f.whole.startswith("Ernie4_5_VL") and f.has_quantized_experts,
            "cannot stack the experts for text and those for images, whose sizes differ",
        ),
        "transformers 5.23.0 and compressed-tensors, run on ernie4_5_vl_moe",
    ),
    row(
        "merged-gates",
        TRANSFORMERS,
        "no",
        when(
            lambda f: f.architecture == "MiniMaxM3VLForCausalLM" and f.config is not None,
            "merges gate_proj and up_proj, whose codes it cannot join, and fills linears of"
            " indexers with random numbers",
        ),
        "transformers 5.23.0 and compressed-tensors, run on minimax_m3_vl",
    ),
    row(
        "always-active-experts",
        OTHERS,
        "no",
        when(
            lambda f: f.architecture == "InklingForCausalLM" and f.config is not None,
            "looks for a tensor of all shared experts, which are linears here",
        ),
        "transformers/models/inkling/modeling_inkling.py InklingSharedExperts; not run elsewhere",
    ),
    row(
        "gemma-experts",
        TRANSFORMERS,
        "no",
        when(
            lambda f: f.architecture == "Gemma4ForCausalLM" and f.has_quantized_experts,
            "looks for float tensors of all experts of a layer, and fills them with random numbers",
        ),
        "transformers 5.23.0 and compressed-tensors, run on gemma4_text",
    ),
    row(
        "unlisted-linears",
        TRANSFORMERS,
        "no",
        lambda f: (
            (name := _unlisted_linear(f))
            and f"treats {name}, which is float but not listed as such, as quantized, and fills it"
            " with random numbers: quantize again"
        ),
        "transformers 5.23.0 and compressed-tensors, run on qwen2_moe, qwen3_next and qwen3_5_moe",
        "compressed-tensors",
    ),
    row(
        "granite-experts-apart",
        SERVERS,
        "no",
        when(
            lambda f: f.architecture.startswith("GraniteMoe") and f.has_quantized_experts,
            "expects the experts of a layer in one tensor (block_sparse_moe.input_linear), not a"
            " linear for each",
        ),
        "transformers/conversion_mapping.py of 5.23.0, granitemoe; vLLM's granitemoe.py"
        " load_weights; read, not run",
    ),
    row(
        "lacks-class",
        TRANSFORMERS,
        "no",
        lambda f: _lacks_class(f.architecture),
        "transformers/models of 5.23.0: step3p7 has Step3p7TextModel, without a class of a text"
        " model with a head; none of exaone, internlm2, baichuan, qwen, solar, plamo2, plamo3,"
        " bailing_moe",
    ),
    row(
        "delta-net",
        VLLM,
        "yes",
        when(
            _has_delta_nets,
            "its source supports gated delta nets; not run here",
        ),
        "vllm/model_executor/models/qwen3_next.py and qwen3_5.py packed_modules_mapping, "
        "olmo_hybrid.py hf_to_vllm_mapper, layers/mamba/gdn/qwen_gdn_linear_attn.py "
        "create_qkvz_proj and create_ba_proj, "
        "layers/linear.py weight_loader_v2 of 0.33.0: in_proj_qkv and in_proj_z are one matrix in "
        "one scheme, as are in_proj_b and in_proj_a, in float or quantized",
    ),
    row(
        "mamba-1",
        VLLM,
        "no",
        when(
            _has_quantized_mamba_1,
            "loads Mamba-1's linears only in float: quantize Jamba with --ignore 're:.*mamba.*'",
        ),
        "vllm/model_executor/layers/mamba/mamba_mixer.py MambaMixer of 00f8d4456f passes no"
        " quant_config to in_proj and out_proj; read, not run",
    ),
    *OWN_RULES,
    *GPTQ_AWQ_RULES,
    *COMPRESSED_RULES,
    *VENDOR_RULES,
    *OTHER_RULES,
)
