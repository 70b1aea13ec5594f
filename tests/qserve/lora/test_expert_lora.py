"""Adapters of routed experts: results equal PEFT's and those of merged weights, in float32."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.dequantize import dequantize_checkpoint
from formats.errors import InputError
from formats.scheme import Scheme
from qserve.lora.merge import merge_adapter
from qserve.lora.request import LoRARequest
from tests.adapters import write_adapter, write_with_peft
from tests.qserve.lora.test_lora_tokens import assert_is, engine, float_model, run
from tests.qserve.model.test_moe import with_mxfp4_experts
from tests.qserve.model.test_transformers import dense
from tests.qserve.parallel.test_expert_parallel import FAMILIES as WITH_EXPERTS

STACKS = ("gate_up_proj", "down_proj")
LEAVES = {"mixtral": ("w1", "w3", "w2")}
FEW = ("qwen3_moe", "gpt_oss", "mixtral")
# DeepSeek-V4 takes no adapters; Inkling's stacks have other names in transformers
FAMILIES = [name for name in WITH_EXPERTS if name not in ("deepseek_v4", "inkling")]
USUAL = ("gate_proj", "up_proj", "down_proj")


def of_experts(family):
    """Ends of the names of experts' linears, and of attention's."""
    leaves = LEAVES.get(family, USUAL)
    return tuple(f"experts.{e}.{leaf}" for e in range(8) for leaf in leaves)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_linears_of_each_expert(tiny_model, tmp_path, family):
    """The file names each expert's linears, as transformers 4 did; PEFT converts it."""
    peft = pytest.importorskip("peft")
    model, leaves = tiny_model(family), LEAVES.get(family, USUAL)
    only = (*of_experts(family), "o_proj")
    loras = []
    for n, rank in enumerate((3, 8)):
        folder = write_adapter(
            model,
            tmp_path / f"{n}",
            rank=rank,
            seed=n,
            only=only,
            experts=True,
            target_modules=[*leaves, "o_proj"],
        )
        loras.append(LoRARequest(f"a{n}", n + 1, str(folder)))
    found = run(engine(model, lora_experts=True), [*loras, None])
    for lora, each in zip(loras, found, strict=False):
        theirs = peft.PeftModel.from_pretrained(float_model(model), lora.lora_path).eval()
        assert_is(theirs, each)
    assert_is(float_model(model), found[-1])


@pytest.mark.parametrize(
    "family",
    [
        name if name in FEW else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in FAMILIES
    ],
)
def test_stacked_experts(tiny_model, tmp_path, family):
    """The file has the matrices of all experts in one tensor, as PEFT's target_parameters."""
    pytest.importorskip("peft")
    model = tiny_model(family)
    is_gated = not family.startswith("nemotron")
    parameters = [f"experts.{name}" for name in (STACKS if is_gated else ("up_proj", "down_proj"))]
    options = {
        "both": {"target_parameters": parameters, "r": 3, "lora_alpha": 5},
        "down": {"target_parameters": parameters[1:], "r": 4, "use_rslora": True},
        "ranks": {
            "target_parameters": parameters,
            "target_modules": ["o_proj"],
            "r": 2,
            "rank_pattern": {r".*up_proj": 5},
            "alpha_pattern": {r".*\.down_proj": 3},
        },
    }
    options = {name: {"target_modules": []} | each for name, each in options.items()}
    theirs, loras = [], []
    for n, (name, config) in enumerate(options.items(), start=1):
        made = write_with_peft(float_model(model), tmp_path / name, seed=n, **config)
        theirs.append(made)
        loras.append(LoRARequest(name, n, str(tmp_path / name)))
    found = run(engine(model, lora_experts=True), [*loras, None])
    for one, each in zip(theirs, found, strict=False):
        assert_is(one, each)
    assert_is(float_model(model), found[-1])


def adapters(model, where, count=2, **options):
    """Adapters of all linears, with different ranks and weights."""
    options = {"experts": True, **options}
    return [
        LoRARequest(
            f"a{n}",
            n + 1,
            str(write_adapter(model, where / f"a{n}", rank=2 + 3 * n, seed=n, **options)),
        )
        for n in range(count)
    ]


def merged(model, lora, where):
    """transformers' model of a folder that `qserve merge` has written; without adapter, its own."""
    if lora is None:
        return float_model(model)
    return float_model(merge_adapter(model, lora.lora_path, where / lora.lora_name).target)


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",  # a shared expert, and a dense layer
        "qwen2_moe",
        "nemotron_h_latent",  # without a gate, between two linears
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("glm4_moe", "minimax_m2", "lfm2_moe", "qwen3_next")
        ),
    ],
)
def test_logits_equal_merged_model(tiny_model, tmp_path, family):
    model = tiny_model(family)
    loras = [*adapters(model, tmp_path), None]
    for lora, found in zip(loras, run(engine(model, lora_experts=True), loras), strict=True):
        assert_is(merged(model, lora, tmp_path / "merged"), found)


@pytest.mark.parametrize("scheme", ["w4a16-sym-g32", "w4a16-mxfp4"])
def test_quantized_base(tiny_model, tmp_path, scheme):
    model, folder = tiny_model("qwen3_moe"), tmp_path / "quantized"
    quantize_checkpoint(model, folder, scheme=Scheme.parse(scheme), recipe="rtn", progress=False)
    loras = [*adapters(model, tmp_path), None]
    plain = dense(folder, tmp_path / "plain", torch.float32)
    for lora, found in zip(loras, run(engine(folder, lora_experts=True), loras), strict=True):
        assert_is(merged(plain, lora, tmp_path / "merged"), found)


def test_published_mxfp4_experts(tiny_model, tmp_path):
    """gpt-oss as it is published, with PEFT's adapters of the stacks of the float model."""
    pytest.importorskip("peft")
    folder = with_mxfp4_experts(tiny_model("gpt_oss"), tmp_path / "mxfp4")
    plain = tmp_path / "plain"
    dequantize_checkpoint(folder, plain, dtype="float32")
    theirs, loras = [], []
    for n, parameters in enumerate((STACKS, STACKS[:1]), start=1):
        made = write_with_peft(
            float_model(plain),
            tmp_path / f"{n}",
            seed=n,
            r=3 * n,
            target_modules=["o_proj"],
            target_parameters=[f"mlp.experts.{name}" for name in parameters],
        )
        theirs.append(made)
        loras.append(LoRARequest(f"a{n}", n, str(tmp_path / f"{n}")))
    found = run(engine(folder, lora_experts=True), [*loras, None])
    for one, each in zip([*theirs, float_model(plain)], found, strict=True):
        assert_is(one, each)


def test_experts_of_one_layer_and_of_other_ranks(tiny_model, tmp_path):
    """Experts without tensors, and with a rank and a scale of their own."""
    model = tiny_model("qwen3_moe")
    only = ("1.mlp.experts.2.gate_proj", "1.mlp.experts.3.gate_proj", "1.mlp.experts.3.down_proj")
    folder = write_adapter(
        model, tmp_path / "few", rank=4, only=only, experts=True, alpha_pattern={only[1]: 3}
    )
    expert = "base_model.model.model.layers.1.mlp.experts.2.gate_proj.lora"
    change_adapter(folder, expert, rank=2, rank_pattern={only[0]: 2})
    lora = LoRARequest("few", 1, str(folder))
    found = run(engine(model, lora_experts=True), [lora, None])
    for each, one in zip(found, (lora, None), strict=True):
        assert_is(merged(model, one, tmp_path / "merged"), each)


def change_adapter(folder, linear, *, rank, **config):
    """Keep the first ranks of a linear, and state it in the configuration."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"{linear}_A.weight"] = tensors[f"{linear}_A.weight"][:rank].clone()
    tensors[f"{linear}_B.weight"] = tensors[f"{linear}_B.weight"][:, :rank].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    stated = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(stated | config))


def test_batch_invariant_tokens(tiny_model, tmp_path):
    """Bits of a request do not depend on the adapters of other requests, or on --enable-lora."""
    model = tiny_model("qwen3_moe")
    loras = [*adapters(model, tmp_path), None]
    llm = engine(model, lora_experts=True, batch_invariant=True)
    together = run(llm, [*loras, *loras])
    assert [run(llm, [lora])[0] for lora in loras] * 2 == together
    plain = engine(model, enable_lora=False, batch_invariant=True)
    assert run(plain, [None]) == together[2:3]


def test_slots_have_no_room_for_experts_by_default(tiny_model, tmp_path):
    model = tiny_model("qwen3_moe")
    without, with_experts = engine(model), engine(model, lora_experts=True)
    (lora,) = adapters(model, tmp_path, 1)
    few, many = (each.engine.runner.adapters.memory.shape for each in (without, with_experts))
    assert few[:2] == many[:2] and many[2] > 3 * few[2]
    with pytest.raises(InputError, match="adapts routed experts.*--lora-experts"):
        without.engine.adapters.read(lora.lora_path)
    attention = write_adapter(model, tmp_path / "attention", only=["o_proj"])
    lora = LoRARequest("attention", 7, str(attention))
    assert run(without, [lora])[0][0] == run(with_experts, [lora])[0][0]


def test_models_without_such_experts_are_refused(tiny_model):
    with pytest.raises(InputError, match="--lora-experts.*has no routed experts"):
        engine(tiny_model("llama"), lora_experts=True)
    with pytest.raises(InputError, match="--lora-experts.*requires --enable-lora"):
        engine(tiny_model("qwen3_moe"), lora_experts=True, enable_lora=False)


def test_too_large_rank_of_a_stack_is_refused(tiny_model, tmp_path):
    pytest.importorskip("peft")
    model = tiny_model("qwen3_moe")
    parameters = [f"mlp.experts.{name}" for name in STACKS]
    write_with_peft(
        float_model(model), tmp_path / "a", r=5, target_modules=[], target_parameters=parameters
    )
    llm = engine(model, lora_experts=True, max_lora_rank=4)
    with pytest.raises(InputError, match="rank of at most 4, found 5.*--max-lora-rank"):
        llm.engine.adapters.read(str(tmp_path / "a"))
