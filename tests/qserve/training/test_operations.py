"""use_engine_operations: the engine's log probabilities, and the gradients of transformers."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from formats.errors import InputError
from qserve import LLM, SamplingParams
from qserve.training import use_engine_operations
from qserve.training.attention import engine_attention

PROMPTS = [[5, 6, 7, 8, 9], [400, 3], [77, 12, 300, 9, 41, 8, 250, 91, 7]]
DRAWN = SamplingParams(
    max_tokens=9, temperature=1.0, seed=3, logprobs=0, ignore_eos=True, detokenize=False
)
CASES = [  # family, scheme
    ("llama", "w4a16-sym-g32"),
    ("qwen3", None),
    ("mistral", "w8a8"),
    *(
        pytest.param(family, scheme, marks=pytest.mark.exhaustive)
        for family in ("qwen2", "phi3", "smollm3", "gemma", "gemma3", "olmo2", "glm", "stablelm")
        for scheme in ("w4a16-asym-g32", "w8a8", "w8a8-fp8", None)
    ),
    *(
        pytest.param(family, "w4a16-sym-g32", marks=pytest.mark.exhaustive)
        for family in (
            *("granite", "seed_oss", "olmo3", "exaone4", "glm4", "starcoder2", "arcee"),
            *("ernie4_5", "cohere", "helium", "cwm", "qwen3", "mistral"),
        )
    ),
]


def load(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def padded(sequences, left):
    """Token ids and mask [B, T]: the first `left` tokens of each end at one column."""
    before, after = max(left), max(len(s) - n for s, n in zip(sequences, left, strict=True))
    ids = torch.zeros(len(sequences), before + after, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (sequence, n) in enumerate(zip(sequences, left, strict=True)):
        columns = slice(before - n, before - n + len(sequence))
        ids[row, columns], mask[row, columns] = torch.tensor(sequence), 1
    return ids, mask


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_training_logprobs_equal_rollout(family, scheme, dtype, tiny_model):
    llm = LLM(
        tiny_model(family),
        quantization=scheme,
        dtype=dtype,
        batch_invariant=True,
        device="cpu",
        max_num_seqs=2,
        num_gpu_blocks_override=64,
        block_size=4,
    )
    model = load(tiny_model(family), getattr(torch, dtype))
    assert bool(use_engine_operations(model, scheme)) == (scheme is not None)
    llm.update_weights(dict(model.named_parameters()))  # a file may have another dtype
    outputs = [each.outputs[0] for each in llm.generate(PROMPTS, DRAWN, use_tqdm=False)]
    whole = [ids + each.token_ids for ids, each in zip(PROMPTS, outputs, strict=True)]
    ids, mask = padded(whole, [len(each) for each in PROMPTS])
    with torch.no_grad():
        logprobs = model(ids, attention_mask=mask).logits.float().log_softmax(-1)
    for row, output in enumerate(outputs):
        first = max(map(len, PROMPTS)) - 1
        places = torch.arange(first, first + len(output.token_ids))
        found = logprobs[row, places, torch.tensor(output.token_ids)].tolist()
        expected = [
            each[token].logprob
            for each, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        assert found == expected


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("family", ["llama", "mistral", "stablelm"])
def test_gradients_equal_transformers(family, device, dtype, tiny_model):
    """In bfloat16 both models round: each is compared with the gradients of a float32 model."""
    exact, plain, model = (load(tiny_model(family), dtype).to(device) for _ in range(3))
    exact = exact.float()
    parameters = dict(model.named_parameters())
    use_engine_operations(model)
    assert all(parameters[name] is each for name, each in model.named_parameters())
    sequences = [[(7 * i + 3 * j) % 500 + 3 for j in range(6 + 5 * i)] for i in range(3)]
    ids, mask = (each.to(device) for each in padded(sequences, [2, 5, 9]))
    torch.manual_seed(0)
    upstream = torch.randn(*ids.shape, 512, device=device) * mask[:, :, None]
    for each in (exact, plain, model):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = each(ids, attention_mask=mask, position_ids=positions).logits
        (logits * upstream).sum().backward()

    def error(parameter, gradient):
        return ((parameter.grad.float() - gradient).norm() / gradient.norm()).item()

    for name, parameter in exact.named_parameters():
        plain_error = error(plain.get_parameter(name), parameter.grad)
        assert error(parameters[name], parameter.grad) < 2 * plain_error + 2e-5, name


def test_training_step_keeps_engine_and_model_equal(tiny_model):
    folder, scheme = tiny_model("qwen2"), "w4a16-sym-g32"
    model = load(folder, torch.float32)
    use_engine_operations(model, scheme)
    settings = {"quantization": scheme, "batch_invariant": True, "num_gpu_blocks_override": 64}
    llm = LLM(folder, device="cpu", **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.tensor([PROMPTS[2]])
    score = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)

    def engine():
        (output,) = llm.generate(PROMPTS[2:], score, use_tqdm=False)
        expected = zip(output.prompt_logprobs[1:], PROMPTS[2][1:], strict=True)
        return [each[token].logprob for each, token in expected]

    seen = []
    for _ in range(2):
        logits = model(ids).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert chosen.tolist() == engine()
        seen.append(engine())
        optimizer.zero_grad()
        (-chosen.mean()).backward()
        optimizer.step()
        llm.update_weights(dict(model.named_parameters()))
    assert seen[0] != seen[1]


def test_unsupported_models_are_refused(tiny_model):
    with pytest.raises(InputError, match="Linear: is not a transformers model"):
        use_engine_operations(torch.nn.Linear(4, 4))
    model = load(tiny_model("llama"), torch.float32)
    with pytest.raises(InputError, match="does not fit"):
        use_engine_operations(model, "w4a16-sym-g48")
    cache = model(torch.tensor([PROMPTS[0]]), use_cache=True).past_key_values
    use_engine_operations(model)
    assert model(torch.tensor([PROMPTS[0]]), use_cache=True).past_key_values is None
    with pytest.raises(InputError, match="LlamaAttention: 1 queries over 6 keys: a KV cache"):
        model(torch.tensor([[3]]), past_key_values=cache)
    tokens = torch.tensor([[5, 6, 7, 8]])
    with pytest.raises(InputError, match="position_ids: start again.*packed sequences are not"):
        model(tokens, position_ids=torch.tensor([[0, 1, 0, 1]]))
    model(tokens, position_ids=torch.tensor([[3, 4, 5, 6]]))
    with pytest.raises(InputError, match=r"attention_mask: expected \[batch, tokens\], found \[1"):
        model(tokens, attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
    q, attention = torch.ones(1, 2, 3, 16), copy.deepcopy(model.model.layers[0].self_attn)
    with pytest.raises(InputError, match="soft caps: is not supported"):
        engine_attention(attention, q, q, q, None, scaling=1.0, softcap=30.0)
    with pytest.raises(InputError, match="dropout: is not supported"):
        engine_attention(attention, q, q, q, None, scaling=1.0, dropout=0.1)
