"""Beam search of the offline API."""

from collections.abc import Sequence

from tqdm import tqdm

from formats.errors import InputError
from formats.numerics.torch_state import torch_defaults
from qserve.errors import relayed_error
from qserve.library.beam_outputs import BeamSearchOutput, beam_search_output, sampling_params
from qserve.library.llm_engine import LLMEngine
from qserve.library.prompts import PromptType, read_prompt, request_options_of
from qserve.params.beam_search_params import BeamSearchParams
from qserve.params.request_options import RequestOptions


@torch_defaults(dtype=False)
def run(
    engine: LLMEngine,
    prompts: Sequence[PromptType],
    params: BeamSearchParams,
    names: Sequence[str],
    use_tqdm: bool,
    detokenize: bool,
) -> list[BeamSearchOutput]:
    """Run a beam search for all prompts in one batch; return outputs in the order of prompts.

    Raises InputError.
    """
    engine.check_health()
    if engine.has_unfinished_requests():
        raise InputError(
            "LLM", "other requests are running on its engine", "call step() until they are done"
        )
    core, tokens, done = engine.engine, {}, {}
    tokenizer = engine.get_tokenizer() if detokenize else None
    sampling = sampling_params(params)
    try:
        for name, prompt in zip(names, prompts, strict=True):
            _, ids = read_prompt(prompt, engine.get_tokenizer)
            options = RequestOptions(
                cache_salt=request_options_of(prompt, 0).cache_salt, beam_search=params
            )
            core.add_request(name, ids, sampling, options=options)
            tokens[name] = ids
        with tqdm(total=len(names), desc="Beam search", unit="prompt", disable=not use_tqdm) as bar:
            while core.has_work():
                for event in core.step():
                    if event.finish_reason == "error":
                        raise relayed_error(f"request {event.request_id}", event.error)
                    done[event.request_id] = event.beams
                    bar.update()
    except BaseException:
        for name in tokens:
            core.abort(name)
        raise
    return [beam_search_output(done[name], tokens[name], params, tokenizer) for name in names]
