"""Mistakes that a type checker reports: one on each line that ends with `# wrong`."""

import qserve
from qserve import LLM, SamplingParams

llm = LLM("./model")
print(qserve.Unknown)  # wrong
LLM("./model", tensor_paralel_size=2)  # wrong
LLM("./model", enable_chunked_prefill=False)  # wrong
LLM("./model", dtype="int3")  # wrong
llm.generate("Hello", {"temperature": 0})  # wrong
llm.generate("Hello", detokenize=False)  # wrong
SamplingParams(temperature="hot")  # wrong
print(llm.generate("Hello")[0].outputs[0].top_logprobs)  # wrong
