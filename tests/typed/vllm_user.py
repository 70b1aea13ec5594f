"""A program written for vLLM. Type checkers read it; nothing runs it."""

import asyncio
from typing import assert_type

from qserve import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    CompletionOutput,
    EngineConfig,
    LLMEngine,
    Logprob,
    LoRARequest,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)


def offline() -> None:
    llm = LLM(
        "./model",
        dtype="bfloat16",
        max_model_len=4096,
        gpu_memory_utilization=0.8,
        trust_remote_code=True,
        swap_space=4,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
        lora_modules=["sql=./sql"],
    )
    assert_type(llm, LLM)
    params = SamplingParams(
        temperature=0.8,
        top_p=0.95,
        max_tokens=64,
        stop=["\n\n"],
        logit_bias={5: 1.0},
        logprobs=5,
        bad_words=["x"],
        stop_token_ids=[2],
        detokenize=True,
        structured_outputs=StructuredOutputsParams(json={"type": "object"}, choice=()),
    )
    SamplingParams(stop="end", seed=None, max_tokens=None)
    outputs = llm.generate("Hello", params)
    assert_type(outputs, list[RequestOutput])
    texts = ["one", "two"]
    ids = [[1, 2, 3], [4, 5]]
    llm.generate(texts, [params, params], use_tqdm=False, priority=[0, 1])
    llm.generate(ids, lora_request=LoRARequest("sql", 1, "./sql"))
    llm.generate(ids[0], lora_request=[None, LoRARequest("sql", 1, "./sql")])
    llm.generate(TokensPrompt(prompt_token_ids=[1, 2], cache_salt="a"))
    llm.generate([TextPrompt(prompt="a"), {"prompt": "b"}, {"prompt_token_ids": [1]}, "c", [5]])
    for output in outputs:
        assert_type(output.prompt_logprobs, list[dict[int, Logprob] | None] | None)
        for completion in output.outputs:
            assert_type(completion, CompletionOutput)
            assert_type(completion.cumulative_logprob, float | None)
            for token, entry in zip(completion.token_ids, completion.logprobs or [], strict=True):
                assert_type(entry, dict[int, Logprob])
                print(entry[token].logprob, entry[token].rank, entry[token].decoded_token)
    conversation = [{"role": "user", "content": "Hi"}]
    assert_type(llm.chat(conversation, params), list[RequestOutput])
    llm.chat([conversation, conversation], chat_template_kwargs={"enable_thinking": False})
    llm.chat(conversation, tools=[{"type": "function", "function": {"name": "f"}}])
    llm.get_tokenizer().apply_chat_template([], tokenize=False, add_generation_prompt=True)
    for beams in llm.beam_search(["a"], BeamSearchParams(beam_width=4)):
        assert_type(beams.sequences[0].logprobs, list[dict[int, Logprob]] | None)


def pooling() -> None:
    llm = LLM(model="./embedding", device="cpu")
    vectors = llm.embed(["a", "b"], PoolingParams(dimensions=256))
    assert_type(vectors[0].outputs.embedding, list[float])
    assert_type(llm.score("a", ["b", "c"])[0].outputs.score, float)
    assert_type(llm.classify("a")[0].outputs.probs, list[float])
    print(llm.encode("a", pooling_task="token_embed")[0].outputs.data.shape)


def loop() -> None:
    engine = LLMEngine.from_engine_args(EngineConfig(model="./model", max_num_seqs=8))
    engine.add_request("1", "Once", SamplingParams(max_tokens=20))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.outputs[0].text)


async def serve() -> None:
    async with AsyncLLM("./model", tensor_parallel_size=2) as llm:
        assert_type(llm, AsyncLLM)
        async for output in llm.generate("Once", SamplingParams(), request_id="1"):
            assert_type(output, RequestOutput)


if __name__ == "__main__":
    offline()
    asyncio.run(serve())
