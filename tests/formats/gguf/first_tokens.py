"""First tokens that llama.cpp (package xllamacpp) finds most likely, and a tokenizer for it."""

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tests.tiny_families import TINY

IDS = list(range(5, 45))
TOP = 20


def first_token(path, exact=False):
    """llama.cpp's log-probabilities of the most likely first tokens, by id.

    `exact`: keys and values are cached in float32, not in float16.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    if exact:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        kinds = xllamacpp.llama_flash_attn_type
        params.flash_attn_type = kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    request = {"prompt": IDS, "n_predict": 1, "temperature": 0, "n_probs": TOP}
    reply = server.handle_completions(request)
    (token,) = reply["choices"][0]["logprobs"]["content"]
    return {each["id"]: each["logprob"] for each in token["top_logprobs"]}


def write_tokenizer(folder):
    """Write a tokenizer with as many tokens as a tiny model has. Single bytes would be no texts."""
    tokens = [chr(33 + i) if i < 94 else f"w{i}" for i in range(TINY["vocab_size"])]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
