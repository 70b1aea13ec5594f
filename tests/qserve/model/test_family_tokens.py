"""Every served family, and the variants of its config: logits and greedy tokens are transformers'.

transformers' own greedy tokens need a forward pass each. Here it sees the engine's text once and
says of every token whether it is the one that it would have chosen.
"""

import random
from dataclasses import replace

import pytest
import torch
import transformers

from calibrate.float_model import FloatModel
from calibrate.texts.data import CalibrationData
from formats.errors import InputError
from qkernels.moe.routing import SILU
from qkernels.rowwise.spec import ActSpec
from qserve.llm import LLM
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.rotary import Rotary
from qserve.model.blocks.shared_attention import SharedAttention
from qserve.model.model_config import ModelConfig
from qserve.model.sharing import check_ranks
from qserve.params.sampling_params import SamplingParams
from tests.conftest import make_tiny
from tests.qserve.model.variants import TOKENS, edited, logits, model_maker, relative
from tests.tiny_families import FALCON, GEMMA, GPT, NEOX, ROWS, TINY, TINY_FAMILIES

NEW = [
    *("ministral", "ministral3", "phi3", "gemma2", "gemma3", "granite", "smollm3", "seed_oss"),
    *("olmo2", "olmo3", "exaone4", "glm4"),
    *("opt", "cohere", "cohere2", "starcoder2", "nemotron"),
    *("gemma", "stablelm", "phi", "gpt_neox"),
    *("gpt2", "gptj", "falcon", "minimax_m2"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    *("granite_moe", "bloom", "mpt", "llama4", "gemma4"),
]
# in the usual run only their logits
EXHAUSTIVE_ROWS = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ROWS]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 9 for i in range(6)],
    "long_factor": [1.5 + i for i in range(6)],
}
PHI4_MINI = {"partial_rotary_factor": 0.75, "tie_word_embeddings": True, "pad_token_id": 0}
FULL = ["full_attention"] * 3
FALCON_40B = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
SIX_HEADS = {"hidden_size": 96, "num_attention_heads": 6}
# what real checkpoints have that the usual tiny models have not
VARIANTS = {
    "mistral small": ("MistralConfig", {"head_dim": 32, "sliding_window": None}),
    "phi-3 mini 4k": ("Phi3Config", {"sliding_window": 9, "pad_token_id": 0}),
    "phi-4 mini, short": (
        "Phi3Config",
        {**PHI4_MINI, "rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
    ),
    "phi-4 mini, long": (
        "Phi3Config",
        {**PHI4_MINI, "rope_parameters": LONGROPE, "original_max_position_embeddings": 8},
    ),
    "gemma 2 without caps": (
        "Gemma2Config",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma 3, scaled": (
        "Gemma3TextConfig",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    "granite, tied": (
        "GraniteConfig",
        {"tie_word_embeddings": True, "embedding_multiplier": 12, "logits_scaling": 0.5},
    ),
    "smollm3, untied": ("SmolLM3Config", {"no_rope_layers": [0, 1, 0], "pad_token_id": 0}),
    "seed-oss with bias of o": ("SeedOssConfig", {"attention_out_bias": True, "head_dim": 16}),
    "exaone 4 1.2b": ("Exaone4Config", {"sliding_window": None, "layer_types": FULL}),
    "stablelm without biases": ("StableLmConfig", {"use_qkv_bias": False}),
    "pythia, one after the other": (
        "GPTNeoXConfig",
        {**NEOX, "use_parallel_residual": False, "attention_bias": False},
    ),
    "falcon 40b": ("FalconConfig", {**FALCON_40B, "bias": True}),
    "falcon 11b": (
        "FalconConfig",
        {**FALCON_40B, "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False},
    ),
    "gpt-bigcode with all heads": ("GPTBigCodeConfig", {**GPT, "multi_query": False}),
    # every second slope of eight, then those between
    "bloom with 6 heads": ("BloomConfig", {**SIX_HEADS, "tie_word_embeddings": False}),
    "mpt with 6 heads": ("MptConfig", {**SIX_HEADS, "max_seq_len": 256}),
    # of 128 experts; no request is longer than a chunk
    "llama 4 maverick": (
        "Llama4TextConfig",
        {
            **TINY_FAMILIES["llama4"][1],
            **{"moe_layers": None, "interleave_moe_layer_step": 2, "attention_chunk_size": 64},
            **{"use_qk_norm": False, "attn_temperature_tuning": False},
        },
    ),
    # what Gemma 4 E2B has, without the rest of it
    "gemma 4, values of their own": (
        "Gemma4TextConfig",
        {**TINY_FAMILIES["gemma4"][1], "attention_k_eq_v": False},
    ),
    "gemma 4, shared keys": (
        "Gemma4TextConfig",
        {
            **TINY_FAMILIES["gemma4"][1],
            **{"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 32},
            "vocab_size_per_layer_input": 600,
        },
    ),
    "gemma 3n, tokens without inputs": (
        "Gemma3nTextConfig",
        {**TINY_FAMILIES["gemma3n"][1], "vocab_size_per_layer_input": 300},
    ),
    "glm-4 without biases": (
        "Glm4Config",
        {"attention_bias": False, "head_dim": 16, "pad_token_id": 0},
    ),
}
FEW_PAGES = {"num_gpu_blocks_override": 9, "admission": "fits", "block_size": 8, "max_num_seqs": 4}
MODES = [
    {**FEW_PAGES, "max_num_batched_tokens": 11},
    pytest.param({"max_num_batched_tokens": 7, "max_num_seqs": 3}, marks=pytest.mark.exhaustive),
    pytest.param(FEW_PAGES, marks=pytest.mark.exhaustive),
]


@pytest.fixture(scope="session")
def model_of(tiny_model, tmp_path_factory):
    """Name of a family or of a variant -> its folder."""
    return model_maker(tiny_model, tmp_path_factory, VARIANTS)


@pytest.mark.parametrize("name", [*NEW, *ROWS, *VARIANTS])
def test_logits_equal_transformers(model_of, transformers_model, name):
    folder = model_of(name)
    with torch.no_grad():
        want = transformers_model(folder)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5


@pytest.mark.parametrize("name", [*NEW, *EXHAUSTIVE_ROWS])
def test_logits_of_quantized_weights_equal_transformers(written, transformers_model, name):
    folder = written("w4a16-sym-g32", "gptq", name)
    with torch.no_grad():
        want = transformers_model(folder)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name, recipe",
    [
        *(("opt", "awq"), ("cohere", "gptq"), ("gpt2", "gptq")),
        *(("deepseek_v2", "gptq"), ("deepseek_v3", "awq")),
        *(("falcon_h1", "awq"), ("lfm2", "gptq")),
        *(
            pytest.param(name, "awq", marks=pytest.mark.exhaustive)
            for name in ("lfm2", "lfm2_moe", "granite_hybrid", "granite_hybrid_moe", "nemotron_h")
        ),
        ("nemotron_h_moe", "gptq"),
        pytest.param("nemotron_h_moe", "awq", marks=pytest.mark.exhaustive),
        pytest.param("nemotron_h_latent", "gptq", marks=pytest.mark.exhaustive),
        pytest.param("gpt2", "awq", marks=pytest.mark.exhaustive),
        pytest.param("falcon", "awq", marks=pytest.mark.exhaustive),
        pytest.param("falcon_rw", "gptq", marks=pytest.mark.exhaustive),
        *(
            pytest.param(name, "gptq", marks=pytest.mark.exhaustive)
            for name in ("falcon", "gptj", "gpt_bigcode", "arcee", "minimax_m2")
        ),
        pytest.param("opt", "gptq", marks=pytest.mark.exhaustive),
        pytest.param("granite_moe", "gptq", marks=pytest.mark.exhaustive),
        pytest.param("granite_moe_shared", "awq", marks=pytest.mark.exhaustive),
        pytest.param("hunyuan_moe", "awq", marks=pytest.mark.exhaustive),
        pytest.param("bloom", "awq", marks=pytest.mark.exhaustive),
        pytest.param("mpt", "gptq", marks=pytest.mark.exhaustive),
        pytest.param("llama4", "gptq", marks=pytest.mark.exhaustive),
        pytest.param("gemma4", "gptq", marks=pytest.mark.exhaustive),
        pytest.param("gemma4", "awq", marks=pytest.mark.exhaustive),
        ("gemma4_moe", "gptq"),
        *(("gemma4_shared", "gptq"), ("gemma3n", "gptq"), ("gemma3n", "awq")),
        pytest.param("apertus", "awq", marks=pytest.mark.exhaustive),
        *(("phimoe", "gptq"), ("hy_v3", "gptq"), ("nanochat", "awq"), ("mellum", "gptq")),
        *(("laguna", "gptq"), ("laguna", "awq"), ("mimo_v2", "gptq"), ("mimo_v2", "awq")),
        *(("granite_swa", "awq"), ("granite_moe_swa", "gptq"), ("olmo", "awq")),
        *(("glm_moe_dsa", "gptq"), ("deepseek_v32", "awq"), ("hyperclovax", "awq")),
        pytest.param("gemma4_shared", "awq", marks=pytest.mark.exhaustive),
        pytest.param("gemma4_moe", "awq", marks=pytest.mark.exhaustive),
        pytest.param("cohere", "awq", marks=pytest.mark.exhaustive),
    ],
)
def test_greedy_tokens_of_solved_weights(written, transformers_model, name, recipe):
    """transformers computes with the dequantized weights of what a calibrated run wrote."""
    ids_WS = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0))
    data = CalibrationData(ids_WS=ids_WS, source="test", seed=0)
    folder = written("w4a16-asym-g32", "gptq", name, recipe=recipe, calibration=data)
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 512) for _ in range(n)] for n in (9, 17, 26, 30, 12)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    llm = LLM(folder, device="cpu", max_model_len=64)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check_greedy(transformers_model(folder), prompts, outputs)


@pytest.mark.parametrize("mode", MODES, ids=["chunked and preempted", "chunked", "preempted"])
@pytest.mark.parametrize("name", [*NEW, *EXHAUSTIVE_ROWS, *VARIANTS])
def test_greedy_tokens_equal_transformers(model_of, transformers_model, monkeypatch, name, mode):
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 512) for _ in range(n)] for n in (9, 17, 26, 30, 12)]
    folder = model_of(name)
    llm = LLM(folder, device="cpu", max_model_len=64, **mode)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    preemptions = count_preemptions(llm, monkeypatch)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    # where all layers have a window its pages are enough for everybody
    few_pages = "num_gpu_blocks_override" in mode and not llm.engine.model_config.longest_window
    assert bool(preemptions) == few_pages
    check_greedy(transformers_model(folder), prompts, outputs)


@pytest.mark.parametrize(
    "name",
    [
        *NEW,
        *EXHAUSTIVE_ROWS,
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in VARIANTS),
    ],
)
def test_tokens_after_a_prefix_that_was_there(model_of, transformers_model, monkeypatch, name):
    """The second prompts go on where a common beginning of two pages ends."""
    rng = random.Random(4)
    start = [rng.randrange(3, 512) for _ in range(17)]
    prompts = [start + [rng.randrange(3, 512) for _ in range(n)] for n in (1, 7, 20)]
    llm = LLM(model_of(name), device="cpu", max_model_len=64, block_size=8)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    llm.generate([start], params, use_tqdm=False)
    starts, schedule = {}, llm.engine.scheduler.schedule

    def noting_schedule():
        plan = schedule()
        for chunk in plan.chunks:
            starts.setdefault(chunk.request.request_id, chunk.start)
        return plan

    monkeypatch.setattr(llm.engine.scheduler, "schedule", noting_schedule)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert list(starts.values()) == [16, 16, 16]
    check_greedy(transformers_model(model_of(name)), prompts, outputs)


def check_greedy(model, prompts, outputs):
    """Each token is the one that transformers would have chosen after those before it."""
    said = {token for output in outputs for token in output.outputs[0].token_ids}
    assert len(said) > 5, "a text that says little"
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        with torch.no_grad():
            chosen = model(torch.tensor([prompt + tokens])).logits[0].argmax(-1)
        assert chosen[len(prompt) - 1 : -1].tolist() == tokens


@pytest.mark.parametrize("name", ["mistral", "phi-3 mini 4k"])
def test_a_text_in_a_window_holds_the_pages_of_the_window(model_of, name):
    """Of 57 tokens a query sees 9; what others have written over is not read."""
    llm = LLM(
        model_of(name),
        device="cpu",
        max_model_len=64,
        block_size=4,
        num_gpu_blocks_override=16,
        admission="fits",
    )
    pool, held, schedule = llm.engine.scheduler.pool, [], llm.engine.scheduler.schedule

    def poisoned():
        plan = schedule()
        held.append(pool.num_pages - pool.num_free)
        used = {page for chunk in plan.chunks for page in chunk.request.block_table}
        free = [page for page in range(pool.num_pages) if page not in used]
        for cache in llm.engine.runner.caches:
            cache.k_pages[free] = cache.v_pages[free] = 1e4
        return plan

    params = SamplingParams(temperature=0, max_tokens=45, ignore_eos=True, detokenize=False)
    (alone,) = llm.generate([TOKENS], params, use_tqdm=False)
    llm.engine.scheduler.schedule = poisoned
    (output,) = llm.generate([TOKENS], params, use_tqdm=False)
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    assert max(held) == 3 and llm.engine.scheduler.pool.num_free == 16


def count_preemptions(llm, monkeypatch):
    """A list that grows by one with each preemption."""
    scheduler, seen = llm.engine.scheduler, []
    schedule = scheduler.schedule

    def counted():
        plan = schedule()
        seen.extend(plan.preempted)
        scheduler.check_integrity()
        return plan

    monkeypatch.setattr(scheduler, "schedule", counted)
    return seen


def every_layer(change):
    def apply(decoder):
        for layer in decoder.layers:
            change(layer)

    return apply


def moved_window(by):
    def change(layer):
        if layer.attention.window is not None:
            layer.attention.window += by

    return every_layer(change)


def swapped(first, second):
    """Two weights of a layer, one in place of the other."""

    def change(layer):
        a, b = (layer.get_submodule(name) for name in (first, second))
        a.weight, b.weight = b.weight, a.weight

    return every_layer(change)


def without_offset(decoder):
    for norm in norms_of(decoder):
        if norm.weight is not None:
            norm.weight -= 1


def other_rotation(layer):
    layer.attention.rotary.interleaved = not layer.attention.rotary.interleaved


def whole_rotation(layer):
    """Twice the channels of a head rotate."""
    rotary = layer.attention.rotary
    rotary.cos_sin = rotary.cos_sin.repeat_interleave(2, 1)


def set_attention(**values):
    def change(layer):
        for name, value in values.items():
            setattr(layer.attention, name, value)

    return every_layer(change)


def set_decoder(**values):
    def change(decoder):
        for name, value in values.items():
            setattr(decoder, name, value)

    return change


def exchanged_rotations(decoder):
    """Layers that slide get the table of those that do not, and the other way round."""
    first, second = dict.fromkeys(layer.attention.rotary for layer in decoder.layers)
    for layer in decoder.layers:
        layer.attention.rotary = second if layer.attention.rotary is first else first


def no_branch_factor(layer):
    layer.attention_end.factor = layer.mlp_end.factor = 1.0


def moved_positions(decoder):
    decoder.embedding.positions = decoder.embedding.positions.roll(2, 0)


def norms_of(decoder):
    return [each for each in decoder.modules() if type(each).__name__ == "Norm"]


def without_biases(decoder):
    for norm in norms_of(decoder):
        norm.bias = None


def set_norms(**values):
    def change(decoder):
        for norm in norms_of(decoder):
            for name, value in values.items():
                setattr(norm, name, value)
            norm._spec = norm._made_spec()

    return change


def other_activation(layer):
    layer.mlp.activation = ActSpec(kind="gelu", gated=False)


def in_sequence(decoder):
    """Each layer as one whose feed-forward follows attention."""
    for number, layer in enumerate(decoder.layers):
        decoder.layers[number] = Layer(
            attention_norm=layer.norm,
            attention=layer.attention,
            mlp_norm=layer.norm,
            mlp=layer.mlp,
        )


def one_norm(layer):
    layer.mlp_norm = None


def swapped_norms(layer):
    layer.norm, layer.mlp_norm = layer.mlp_norm, layer.norm


def without_head_bias(decoder):
    decoder.head.bias = None


def plain_relu(layer):
    layer.mlp.activation = ActSpec(kind="relu", gated=False)


def by_scores_alone(layer):
    layer.mlp.router.correction.zero_()


def unnormalized(layer):
    """Routing weights as softmax over all experts gives them."""
    routing = layer.mlp.router.routing
    layer.mlp.router.routing = replace(routing, scores="softmax", normalized=False)


def exchanged_slopes(layer):
    """Slopes in the order of the powers of two."""
    layer.attention.slopes = layer.attention.slopes.sort(descending=True).values


def unscaled_slopes(layer):
    layer.attention.slopes *= layer.attention.head_dim**0.5


def open_gates(layer):
    """Each gate is a half: sigmoid(0)."""
    attention = layer.attention
    queries = attention.num_heads * attention.head_dim
    attention.qkv_proj.weight[queries : 2 * queries] = 0


def longer_chunk(layer):
    if layer.attention.chunk_size is not None:
        layer.attention.chunk_size += 1


def scaled_outputs(layer):
    layer.mlp.scales_inputs = False


def unscaled(layer):
    layer.factor.fill_(1.0)


def values_of_normed_keys(layer):
    """Values multiplied as keys are, where keys are values."""
    if layer.attention.keys_are_values:
        layer.attention.v_norm = layer.attention.k_norm


def exchanged_inputs(decoder):
    """Each layer gets the next layer's input."""
    right = decoder.layer_inputs.forward
    decoder.layer_inputs.forward = lambda *given: right(*given).roll(-1, 1)


def without_input(layer):
    layer.layer_input = None


def other_gate(layer_input):
    layer_input.activation = ActSpec(kind="silu", gated=False)


def without_rotation(layer):
    rotary = layer.attention.rotary
    layer.attention.rotary = Rotary(rotary.cos_sin[:, :0], rotary.interleaved)


def router_of(change):
    """`change` of each router of experts next to a feed-forward."""
    return every_layer(lambda layer: change(layer.mlp.experts.router))


def router_reads_experts_input(layer):
    """The router reads what the experts read, as in other families."""
    experts, right = layer.mlp.experts, layer.mlp.experts.forward
    experts.forward = lambda x_TC, plan, routed_TC: right(x_TC, plan, x_TC)


def experts_read_dense_input(layer):
    layer.mlp.experts_norm = layer.mlp_norm


def sum_of_branches_without_norms(layer):
    layer.mlp.experts_end.norm = None


def shared_layers(change):
    """`change` of each layer that reads keys and values of an earlier one."""

    def apply(decoder):
        found = [layer for layer in decoder.layers if isinstance(layer.attention, SharedAttention)]
        assert len(found) == 3
        for layer in found:
            change(layer)

    return apply


def swish(layer):
    prepared = layer.mlp.experts.experts
    layer.mlp.experts.experts = replace(prepared, glu=SILU)


def set_xielu(**values):
    def change(layer):
        for name, value in values.items():
            getattr(layer.mlp, name).fill_(value)

    return every_layer(change)


def exchanged_slopes_of_xielu(layer):
    layer.mlp.alpha_p, layer.mlp.alpha_n = layer.mlp.alpha_n, layer.mlp.alpha_p


def without_embedding_norm(decoder):
    decoder.embedding.norm = None


def without_shared(layer):
    layer.mlp.shared = None


def plain_embedding(decoder):
    decoder.embedding.factor = 1.0


def set_routing(**values):
    """Other rules of the routers of experts."""

    def change(decoder):
        for layer in decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is not None:
                router.routing = replace(router.routing, **values)

    return change


def turned_rotation(decoder):
    """Pairs turn the other way."""
    rotary = decoder.layers[0].attention.rotary
    half = rotary.cos_sin.shape[1] // 2
    rotary.cos_sin[:, half:].neg_()


def without_norms_after(layer):
    layer.attention_end.norm = layer.mlp_end.norm = None


def other_streams(name, change):
    """`change` of a matrix of the streams."""

    def apply(decoder):
        setattr(decoder.streams, name, change(getattr(decoder.streams, name)))

    return apply


def without_laurel(layer):
    layer.laurel.right.zero_()


def without_sparsity(layer):
    if hasattr(layer.mlp, "deviations"):
        layer.mlp.deviations = -1e4  # nothing is left out, and all gates are large


WRONG = {
    "window one longer": ("ministral", moved_window(1)),
    "window one shorter": ("gemma3", moved_window(-1)),
    "window of a fused model": ("phi-3 mini 4k", moved_window(1)),
    "norms without their 1": ("gemma2", without_offset),
    "norms of heads without their 1": (
        "gemma3",
        every_layer(lambda layer: layer.attention.q_norm.sub_(1)),
    ),
    "norm behind attention taken for that before the feed-forward, Gemma": (
        "gemma2",
        swapped("attention_end.norm", "mlp_norm"),
    ),
    "norm behind attention taken for that before the feed-forward, GLM": (
        "glm4",
        swapped("attention_end.norm", "mlp_norm"),
    ),
    "norms behind taken for each other": ("olmo2", swapped("attention_end.norm", "mlp_end.norm")),
    "norms before and behind exchanged": ("olmo3", swapped("attention_norm", "attention_end.norm")),
    "norms of all heads taken for norms of each": ("olmo2", set_attention(q_norm=None)),
    "rotation of the other kind of layer, Gemma 3": ("gemma 3, scaled", exchanged_rotations),
    "rotation of the other kind of layer, OLMo 3": ("olmo3", exchanged_rotations),
    "layers that rotate exchanged with those that do not": ("smollm3", exchanged_rotations),
    "layers that rotate exchanged, EXAONE": ("exaone4", exchanged_rotations),
    "halves taken for neighbours": ("phi3", every_layer(other_rotation)),
    "neighbours taken for halves": ("glm4", lambda d: other_rotation(d.layers[0])),
    "scale of head_dim": ("gemma2", set_attention(scale=16**-0.5)),
    "scale of head_dim, Granite": ("granite", set_attention(scale=16**-0.5)),
    "scores not bent": ("gemma2", set_attention(soft_cap=None)),
    "logits not bent": ("gemma2", set_decoder(logits_cap=None)),
    "logits not divided": ("granite", set_decoder(logits_divisor=1.0)),
    "branches not multiplied": ("granite", every_layer(no_branch_factor)),
    "embeddings not multiplied": ("granite", plain_embedding),
    "embeddings not multiplied by a root": ("gemma3", plain_embedding),
    "positions without their offset": ("opt", moved_positions),
    "layer norms without their biases": ("opt", without_biases),
    "layer norms taken for RMS norms": ("opt", set_norms(kind="rms", bias=None)),
    "layer norms taken for RMS norms, Cohere": ("cohere", set_norms(kind="rms")),
    "ReLU taken for GELU": ("opt", every_layer(other_activation)),
    "feed-forward that reads attention's sum": ("cohere", in_sequence),
    "logits not multiplied": ("cohere", set_decoder(logits_factor=1.0)),
    "layers that rotate exchanged, Cohere 2": ("cohere2", exchanged_rotations),
    "positions without their offset, GPT-2": ("gpt2", moved_positions),
    "layer norms without their biases, GPT-2": ("gpt2", without_biases),
    "halves taken for neighbours, GPT-J": ("gptj", every_layer(other_rotation)),
    "feed-forward that reads attention's sum, GPT-J": ("gptj", in_sequence),
    "head without its bias": ("gptj", without_head_bias),
    "neighbours taken for halves, Falcon": ("falcon", every_layer(other_rotation)),
    "feed-forward that reads attention's sum, Falcon": ("falcon", in_sequence),
    "one norm of two": ("falcon 40b", every_layer(one_norm)),
    "norms of attention and feed-forward exchanged": ("falcon 40b", every_layer(swapped_norms)),
    "halves taken for neighbours, ERNIE": ("ernie4_5", lambda d: other_rotation(d.layers[0])),
    "halves taken for neighbours, GLM": ("glm", lambda d: other_rotation(d.layers[0])),
    "norms of heads before the rotation": ("hunyuan", set_attention(rotates_first=False)),
    "ReLU without its square": ("arcee", every_layer(plain_relu)),
    "norms of all heads taken for norms of each, MiniMax": (
        "minimax_m2",
        set_attention(q_norm=None),
    ),
    "experts chosen without the correction": ("minimax_m2", every_layer(by_scores_alone)),
    "shares of all experts, GraniteMoE": ("granite_moe", every_layer(unnormalized)),
    "branches not multiplied, GraniteMoE": ("granite_moe", every_layer(no_branch_factor)),
    "shared expert left out": ("granite_moe_shared", every_layer(without_shared)),
    "no biases of scores, BLOOM": ("bloom", set_attention(slopes=None)),
    "no biases of scores, MPT": ("mpt", set_attention(slopes=None)),
    "no biases of scores, Falcon": ("falcon_rw", set_attention(slopes=None)),
    "biases of scores that are not scaled": ("falcon_rw", every_layer(unscaled_slopes)),
    "norms exchanged, Falcon": ("falcon_rw", swapped("attention_norm", "mlp_norm")),
    "slopes in another order, BLOOM": ("bloom with 6 heads", every_layer(exchanged_slopes)),
    "slopes in another order, MPT": ("mpt with 6 heads", every_layer(exchanged_slopes)),
    "chunks one longer": ("llama4", every_layer(longer_chunk)),
    "all keys": ("llama4", set_attention(chunk_size=None)),
    "outputs of experts multiplied, Llama 4": ("llama4", every_layer(scaled_outputs)),
    "queries that do not grow, Llama 4": ("llama4", set_attention(query_scales=None)),
    "heads without their norms, Llama 4": (
        "llama4",
        set_attention(q_norm=None, k_norm=None, norms_heads=False),
    ),
    "halves taken for neighbours, Llama 4": ("llama4", lambda d: other_rotation(d.layers[0])),
    "values not normed, Gemma 4": ("gemma4", set_attention(v_norm=None)),
    "values with the weights of keys' norm": ("gemma4", every_layer(values_of_normed_keys)),
    "layers not multiplied, Gemma 4": ("gemma4", every_layer(unscaled)),
    "norms of both branches exchanged, Gemma 4": (
        "gemma4_moe",
        swapped("mlp.mlp_norm", "mlp.experts_end.norm"),
    ),
    "norms before and after experts exchanged, Gemma 4": (
        "gemma4_moe",
        swapped("mlp.experts_norm", "mlp.experts_end.norm"),
    ),
    "experts without a norm after, Gemma 4": (
        "gemma4_moe",
        every_layer(sum_of_branches_without_norms),
    ),
    "experts that read the feed-forward's input": (
        "gemma4_moe",
        every_layer(experts_read_dense_input),
    ),
    "router that reads the experts' input": ("gemma4_moe", every_layer(router_reads_experts_input)),
    "router without its norm": ("gemma4_moe", router_of(lambda r: setattr(r, "norm", None))),
    "router without its scale": (
        "gemma4_moe",
        router_of(lambda router: router.norm.weight.fill_(TINY["hidden_size"] ** -0.5)),
    ),
    "router without the root of the width": (
        "gemma4_moe",
        router_of(lambda router: router.norm.weight.mul_(TINY["hidden_size"] ** 0.5)),
    ),
    "experts without their scales": (
        "gemma4_moe",
        router_of(lambda router: router.expert_scale.fill_(1.0)),
    ),
    "experts with SiLU, Gemma 4": ("gemma4_moe", every_layer(swish)),
    "no inputs of layers": (
        "gemma4_shared",
        every_layer(lambda x: setattr(x, "layer_input", None)),
    ),
    "inputs of layers without a norm after": (
        "gemma4_shared",
        every_layer(lambda layer: setattr(layer.layer_input.end, "norm", None)),
    ),
    "inputs of layers with SiLU": (
        "gemma4_shared",
        every_layer(
            lambda x: setattr(x.layer_input, "activation", ActSpec(kind="silu", gated=False))
        ),
    ),
    "rows of layers' inputs not multiplied by a root": (
        "gemma4_shared",
        lambda decoder: setattr(decoder.layer_inputs.table, "factor", 1.0),
    ),
    "products of layers' inputs without their norm": (
        "gemma4_shared",
        lambda decoder: decoder.layer_inputs.norm.weight.fill_(1.0),
    ),
    "inputs of layers in another order": ("gemma4_shared", exchanged_inputs),
    "queries of shared layers not normed": (
        "gemma4_shared",
        shared_layers(lambda layer: layer.attention.q_norm.fill_(1.0)),
    ),
    "queries of shared layers that do not rotate": (
        "gemma4_shared",
        shared_layers(without_rotation),
    ),
    "slopes of xIELU exchanged": ("apertus", every_layer(exchanged_slopes_of_xielu)),
    "xIELU without its linear part": ("apertus", set_xielu(beta=0.0)),
    "one slope of xIELU for all layers": ("apertus", set_xielu(alpha_p=0.8)),
    "norms exchanged, Apertus": ("apertus", swapped("attention_norm", "mlp_norm")),
    "embeddings not normed": ("bloom", without_embedding_norm),
    "the whole head rotates, Bamba": ("bamba", lambda d: whole_rotation(d.layers[1])),
    "norms exchanged, Bamba": ("bamba", swapped("attention_norm", "mlp_norm")),
    "halves taken for neighbours, Helium": ("helium", lambda d: other_rotation(d.layers[0])),
    "window one longer, CWM": ("cwm", moved_window(1)),
    "ReLU without its square, Jais 2": ("jais2", every_layer(plain_relu)),
    "layer norms without their biases, Jais 2": ("jais2", without_biases),
    "scores not bent, VaultGemma": ("vaultgemma", set_attention(soft_cap=None)),
    "norms without their 1, VaultGemma": ("vaultgemma", without_offset),
    "experts chosen without the correction, Solar Open": (
        "solar_open",
        every_layer(by_scores_alone),
    ),
    "shared expert left out, Solar Open": ("solar_open", every_layer(without_shared)),
    "experts chosen without the correction, K-EXAONE": (
        "exaone_moe",
        lambda d: by_scores_alone(d.layers[1]),
    ),
    "layers that rotate exchanged, K-EXAONE": ("exaone_moe", exchanged_rotations),
    "window one longer, K-EXAONE": ("exaone_moe", moved_window(1)),
    "norms of all heads taken for norms of each, FlexOlmo": (
        "flex_olmo",
        set_attention(q_norm=None),
    ),
    "norms after taken for each other, FlexOlmo": (
        "flex_olmo",
        swapped("attention_end.norm", "mlp_end.norm"),
    ),
    "gates of attention left out, AFMoE": ("afmoe", every_layer(open_gates)),
    "experts chosen without the correction, AFMoE": (
        "afmoe",
        lambda d: by_scores_alone(d.layers[1]),
    ),
    "layers that rotate exchanged, AFMoE": ("afmoe", exchanged_rotations),
    "embeddings not multiplied by a root, AFMoE": ("afmoe", plain_embedding),
    "norms before and after exchanged, AFMoE": (
        "afmoe",
        swapped("attention_norm", "attention_end.norm"),
    ),
    "halves taken for neighbours, MiniCPM3": ("minicpm3", lambda d: other_rotation(d.layers[0])),
    "branches not multiplied, MiniCPM3": ("minicpm3", every_layer(no_branch_factor)),
    "embeddings not multiplied, MiniCPM3": ("minicpm3", plain_embedding),
    "logits not divided, MiniCPM3": ("minicpm3", set_decoder(logits_divisor=1.0)),
    "queries that do not grow, Mistral 4": ("mistral4", set_attention(query_scales=None)),
    "halves taken for neighbours, Mistral 4": ("mistral4", every_layer(other_rotation)),
    "shares of all experts, Mistral 4": ("mistral4", lambda d: unnormalized(d.layers[1])),
    "shares of all experts, Hunyuan": ("hunyuan_moe", every_layer(unnormalized)),
    "streams in another order, Gemma 3n": ("gemma3n", other_streams("into", lambda x: x.flip(0))),
    "streams not led back, Gemma 3n": ("gemma3n", other_streams("back", torch.zeros_like)),
    "streams not corrected, Gemma 3n": (
        "gemma3n",
        every_layer(lambda layer: layer.altup.correction_coefs.zero_()),
    ),
    "predictions transposed, Gemma 3n": (
        "gemma3n",
        every_layer(
            lambda layer: layer.altup.prediction_coefs.copy_(
                layer.altup.prediction_coefs.unflatten(0, (4, 4)).transpose(0, 1).flatten(0, 1)
            )
        ),
    ),
    "no product of low rank, Gemma 3n": ("gemma3n", every_layer(without_laurel)),
    "all gates, Gemma 3n": ("gemma3n", every_layer(without_sparsity)),
    "inputs that read an unscaled stream, Gemma 3n": (
        "gemma3n",
        every_layer(lambda layer: layer.output_scale.fill_(1.0)),
    ),
    "inputs of layers in another order, Gemma 3n": ("gemma3n", exchanged_inputs),
    "shares of both chosen experts, Phi-3.5-MoE": (
        "phimoe",
        set_routing(scores="softmax_of_chosen"),
    ),
    "shares of all other experts, Phi-3.5-MoE": ("phimoe", set_routing(jitter=1e4)),
    "head without its bias, Phi-3.5-MoE": ("phimoe", without_head_bias),
    "layer norms taken for RMS norms, Phi-3.5-MoE": ("phimoe", set_norms(kind="rms", bias=None)),
    "pairs that turn the usual way, nanochat": ("nanochat", turned_rotation),
    "embeddings not normed, nanochat": ("nanochat", without_embedding_norm),
    "queries not normed, nanochat": ("nanochat", every_layer(lambda x: x.attention.q_norm.mul_(2))),
    "logits not bent, nanochat": ("nanochat", set_decoder(logits_cap=None)),
    "rotation of the other kind of layer, Mellum": ("mellum", exchanged_rotations),
    "shares not normalized, Mellum": ("mellum", set_routing(normalized=False)),
    "experts chosen without the correction, Hy3": (
        "hy_v3",
        lambda decoder: by_scores_alone(decoder.layers[1]),
    ),
    "shares without their factor, Hy3": ("hy_v3", set_routing(factor=1.0)),
    "logits not multiplied, HyperCLOVA X": ("hyperclovax", set_decoder(logits_factor=1.0)),
    "no norms after, HyperCLOVA X": ("hyperclovax", every_layer(without_norms_after)),
    "halves taken for neighbours, Youtu": ("youtu", lambda d: other_rotation(d.layers[0])),
    "queries that do not grow": ("ministral3", set_attention(query_scales=None)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reading_is_seen(model_of, wrong):
    """Each would load without an error: the comparison above is what tells."""
    name, plant = WRONG[wrong]
    llm = LLM(model_of(name), device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    with torch.inference_mode():
        plant(llm.engine.runner.decoder)
    assert relative(llm.logits(TOKENS), right) > 1e-3


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("InternLM3ForCausalLM", "internlm3"), ("IQuestCoderForCausalLM", "iquestcoder")],
)
def test_models_with_llamas_layers(model_of, tmp_path, architecture, model_type):
    """transformers builds them as Llama; their files have names of their own in config.json."""
    names = {"architectures": [architecture], "model_type": model_type}
    folder = edited(model_of("llama"), tmp_path / "x", config=lambda config: config.update(names))
    assert torch.equal(logits(folder), logits(model_of("llama")))


def test_adapters_of_four_linears_in_one_matrix_are_refused(model_of):
    with pytest.raises(
        InputError, match="--enable-lora: does not work with Afmoe.*adapters take 3"
    ):
        LLM(model_of("afmoe"), device="cpu", max_model_len=64, enable_lora=True)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "glm4", "deepseek_v3"])
def test_float16_is_refused_where_activations_leave_its_range(model_of, name):
    with pytest.raises(InputError, match="--dtype float16.*--dtype bfloat16"):
        LLM(model_of(name), device="cpu", max_model_len=64, dtype="float16")


@pytest.mark.parametrize(
    "config_class, changed",
    [
        ("OPTConfig", {"do_layer_norm_before": False}),
        ("OPTConfig", {"word_embed_proj_dim": 32}),
        ("OPTConfig", {"layer_norm_elementwise_affine": False}),
        ("CohereConfig", {"use_qk_norm": True}),
        ("GPT2Config", {"scale_attn_by_inverse_layer_idx": True}),
        ("FalconConfig", {"alibi": True, "parallel_attn": True}),
        ("FalconConfig", {"parallel_attn": False}),
        (
            "FalconConfig",
            {"alibi": True, "parallel_attn": False, "new_decoder_architecture": True},
        ),
        ("OlmoeConfig", {"clip_qkv": 4.0}),
        (
            "Gemma4TextConfig",
            {**TINY_FAMILIES["gemma4_moe"][1], "hidden_size_per_layer_input": 16},
        ),
        ("Gemma4TextConfig", {"use_bidirectional_attention": "all"}),
    ],
)
def test_a_variant_that_nothing_computes_is_refused(tmp_path, config_class, changed):
    """Both by the server and before quantization."""
    usual = {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": 4}
    if config_class == "Gemma4TextConfig":
        usual = {**TINY_FAMILIES["gemma4"][1], "vocab_size_per_layer_input": 512}
    folder = make_tiny(tmp_path / "model", config_class, {**usual, **changed})
    key = "hidden_size_per_layer_input" if len(changed) > 3 else list(changed)[-1]
    refused = rf"config\.json {key}: expected .*, found .*not supported"
    with pytest.raises(InputError, match=refused):
        LLM(folder, device="cpu", max_model_len=64)
    with pytest.raises(InputError, match=refused):
        FloatModel(folder)


@pytest.mark.parametrize(
    "changed",
    [{"clip_qkv": 6.0}, {"alibi": False}, {"softmax_scale": 0.5}, {"alibi_bias_max": 16}],
)
def test_a_variant_of_mpt_that_nothing_computes_is_refused(model_of, tmp_path, changed):
    (key,) = changed
    folder = edited(
        model_of("mpt"), tmp_path / "x", config=lambda c: c["attn_config"].update(changed)
    )
    for read in (FloatModel, lambda folder: LLM(folder, device="cpu")):
        with pytest.raises(InputError, match=rf"attn_config\.{key}: expected .*not supported"):
            read(folder)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("RWForCausalLM", "falcon-7b"), ("ChatGLMModel", "glm-4-9b")],
)
def test_an_architecture_is_refused_by_name(model_of, tmp_path, architecture, reason):
    folder = edited(
        model_of("gpt2"),
        tmp_path / "model",
        config=lambda config: config.update(architectures=[architecture]),
    )
    for read in (FloatModel, lambda folder: LLM(folder, device="cpu")):
        with pytest.raises(InputError, match=f"{architecture} .*{reason}"):
            read(folder)


def test_a_length_beyond_the_learned_positions_is_refused(model_of):
    with pytest.raises(InputError, match="max-model-len: expected 2 to 256"):
        LLM(model_of("opt"), device="cpu", max_model_len=257)


def test_a_gemma_that_sees_what_follows_is_refused(tmp_path):
    folder = make_tiny(
        tmp_path / "model", "Gemma3TextConfig", {**GEMMA, "use_bidirectional_attention": True}
    )
    with pytest.raises(InputError, match="use_bidirectional_attention"):
        LLM(folder, device="cpu", max_model_len=64)


def test_rms_norm_of_gemma_keeps_float32_weights(model_of):
    """1 + weight in 16 bits would lose what is below its last bit."""
    decoder = LLM(
        model_of("gemma3"), device="cpu", max_model_len=64, dtype="bfloat16"
    ).engine.runner.decoder
    assert decoder.norm.weight.dtype == torch.float32
    assert decoder.dtype == torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_of("gemma3"), dtype=torch.bfloat16
    )
    x = torch.randn(5, TINY["hidden_size"], generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        theirs = model.model.norm.float()
        theirs.weight.copy_(decoder.norm.weight - 1)
        want = theirs(x)
    assert torch.equal(decoder.norm(x, None, None)[0], want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        *("gemma2", "gemma3", "granite", "olmo2", "glm4", "ministral3"),
        *("gpt2", "opt", "falcon", "cohere", "nemotron", "bloom", "mpt"),
        *("granite_moe", "llama4", "gemma4", "deepseek_v2", "glm4_moe_lite"),
        *("gemma4_moe", "gemma4_shared", "apertus"),
        *("phimoe", "nanochat", "hy_v3", "hyperclovax", "gemma3n"),
        *("laguna", "mimo_v2", "granite_swa", "granite_moe_swa", "olmo"),
    ],
)
def test_logits_on_a_gpu_are_the_cpus(written, name):
    """In bfloat16, a prompt and decode steps: a wrong reading differs by far more."""
    folder = written("w4a16-sym-g32", "gptq", name)
    on_cpu = LLM(folder, device="cpu", max_model_len=64)
    on_gpu = LLM(
        folder,
        device="cuda",
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=2,
        num_gpu_blocks_override=64,  # others may use the GPU as well
        enforce_eager=True,
    )
    # a tiny random model turns a last bit of 8 into up to 4 percent
    assert relative(on_gpu.logits(TOKENS).cpu(), on_cpu.logits(TOKENS)) < 0.1
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    (output,) = on_gpu.generate([TOKENS], params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    logits_TV = on_cpu.logits(TOKENS + tokens)[-9:-1]
    chosen_T = logits_TV[torch.arange(8), torch.tensor(tokens)]
    behind_T = (logits_TV.amax(-1) - chosen_T) / (logits_TV.amax(-1) - logits_TV.mean(-1))
    assert behind_T.max() < 0.3, "far from the largest"


def test_layers_with_different_heads_are_not_divided_over_gpus(model_of):
    with pytest.raises(InputError, match="tensor-parallel-size 2: .*Gemma4.*different heads"):
        check_ranks(ModelConfig.from_folder(model_of("gemma4")), 2, 1)


@pytest.mark.parametrize("name", ["gemma4_shared", "gemma 4, shared keys"])
def test_layers_that_read_others_are_not_divided_over_stages(model_of, name):
    with pytest.raises(InputError, match="pipeline-parallel-size 2: .*Gemma4.*other stages"):
        check_ranks(ModelConfig.from_folder(model_of(name)), 1, 2)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"vocab_size_per_layer_input": 500}, "vocab_size_per_layer_input: expected the 512"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers: layer 1 reads keys .* sliding"),
    ],
)
def test_a_damaged_config_of_gemma_4_is_refused(model_of, tmp_path, changed, reason):
    folder = edited(model_of("gemma4_shared"), tmp_path / "x", config=lambda c: c.update(changed))
    with pytest.raises(InputError, match=reason):
        LLM(folder, device="cpu", max_model_len=64)


def test_keys_of_shared_layers_are_not_read(model_of, tmp_path):
    """Published files have them all the same, and transformers leaves them out."""

    def add(state):
        for layer in (3, 4, 5):
            for name in ("k_proj", "v_proj", "k_norm"):
                state[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.ones(1)

    folder = edited(model_of("gemma4_shared"), tmp_path / "x", add)
    assert torch.equal(logits(folder), logits(model_of("gemma4_shared")))


def test_shared_layers_keep_nothing(model_of):
    """Pages hold the keys and values of three of six layers."""
    runner = LLM(model_of("gemma4_shared"), device="cpu", max_model_len=64).engine.runner
    sizes = [spec.bytes_per_page for spec in runner.cache_specs]
    assert all(sizes[:3]) and not any(sizes[3:])
    assert runner.bytes_per_page == sum(sizes)
    assert len(runner.cache_tensors()) == 6  # keys and values of three layers
