"""Jobs of POST /v1/completions."""

from qserve.server.requests.generation_job import checked_params, encode, fitted, generation_job
from qserve.server.requests.generation_params import form_param, form_warnings, output_form
from qserve.server.requests.job import Arrival, Job
from qserve.server.requests.protocol import CompletionRequest, parse
from qserve.server.requests.served_model import ServedModel


def completion_job(model: ServedModel, body: bytes | bytearray, arrival: Arrival) -> Job:
    """Return the job of a body of /v1/completions. Raises ApiError and InputError."""
    request = parse(body, CompletionRequest)
    params = checked_params(model, request, len(request.prompt))
    special = request.add_special_tokens is not False
    prompts = [
        encode(model, prompt, special, request) if isinstance(prompt, str) else prompt
        for prompt in request.prompt
    ]
    skip = request.skip_special_tokens is not False
    echoed = [
        prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt, skip)
        for prompt in request.prompt
        if request.echo
    ]
    form = output_form(request)
    return generation_job(
        model,
        request,
        arrival,
        prefix="cmpl-",
        prompts=fitted(model, request, prompts),
        params=params,
        form=form,
        ignored=request.ignored,
        warnings=form_warnings(model, form, form_param(request)),
        echoed=echoed,
    )
