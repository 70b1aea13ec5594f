"""First tokens that llama.cpp finds most likely after a fixed prompt (package xllamacpp)."""

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
