"""Load a model folder into a FallbackDecoder, and verify its paged attention on a short text.

Hidden states and logits of a few tokens, computed in chunks over pages, must equal those of
transformers' own attention. A model with another attention mask, a bias on scores or recurrent
states fails this check and is refused.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from formats.checkpoint import read_json
from formats.errors import CheckpointError, InputError, one_line
from formats.in_memory.weights import Weight
from formats.scheme import Scheme
from qkernels import QuantLinear
from qserve.model.blocks.attention import StepInputs
from qserve.model.fallback.attention import INTERFACE, Call, attach
from qserve.model.fallback.capture import refusal_of_graphs
from qserve.model.fallback.decoder import FallbackDecoder, QuantizedLinear
from qserve.model.fallback.division import Division, cut_, divide, first_layer_states
from qserve.model.fallback.support import config_of, model_class
from qserve.model.loading.dummy_source import DummySource
from qserve.model.loading.finite_check import FiniteCheck
from qserve.model.loading.weight_source import WeightSource
from qserve.model.loading.weights import kernel_operation
from qserve.model.model_config import ModelConfig
from qserve.model.tp_plan import WHOLE, LinearShard
from qserve.parallel.communicator import Communicator

logger = logging.getLogger(__name__)

# Chunks of the check: a prompt longer than a page, then single tokens. If a layer keeps anything
# besides keys and values, results of later chunks are wrong.
CHUNKS = (17, *[1] * 15)
PAGE = 16
FULL, SLIDING = "full_attention", "sliding_attention"  # values of layer_types
# Bytes of an element -> (minimum cosine of a row with transformers' row, fraction of rows that must
# reach it). In 16 bits a token may be routed to other experts.
AGREEMENT = {4: (0.9999, 1.0), 2: (0.98, 0.8)}


def load_fallback(
    config: ModelConfig,
    source: WeightSource | DummySource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Mapping[str, str],
    communicator: Communicator | None = None,
) -> FallbackDecoder:
    """Build the decoder. Raises InputError for a model that cannot run through transformers.

    `communicator`: the tensor-parallel ranks; the decoder holds this rank's shard.
    """
    if isinstance(source, DummySource):
        raise InputError(
            "--load-format dummy",
            f"{config.family.architecture} runs through transformers, which needs its weights",
            "remove it",
        )
    folder = source.reader.folder
    raw = read_json(Path(folder) / "config.json")
    cls = model_class(raw)
    logger.info(
        "%s has no implementation here; it runs through transformers", config.family.architecture
    )
    quantized = None
    if config.quant is None:
        model = load_float(cls, raw, folder, dtype)
    else:
        quantized = _Quantized(source, device, dtype, kernels)
        model = _built(cls, raw)
    division = None
    if communicator is not None:
        division = divide(
            model,
            config.family.architecture,
            communicator.rank,
            communicator.size,
            lambda name: None if quantized is None else quantized.scheme_of(name),
        )
    if quantized is not None:
        quantized.fill_(model, division)
    _check_finite(model)
    model = model.train(False).requires_grad_(False)
    call = Call(config.family.architecture)
    if division is None:
        model = model.to(device)
    else:
        model = _divided(config, model, division, communicator, quantized, call, device)
    attach(model, call)
    return _proven(config, model, call, device, kernels.get("attention"))


def _check_finite(model: torch.nn.Module) -> None:
    """Raise CheckpointError if a float parameter has NaN or infinity."""
    check = FiniteCheck()
    for name, parameter in model.named_parameters():
        check.add(name, parameter.detach())
    check.check()


def load_float(cls: Any, raw: Mapping[str, Any], folder: Path, dtype: torch.dtype) -> Any:
    """Load float weights with transformers, which also supports older tensor names."""
    try:
        model, found = cls.from_pretrained(
            str(folder),
            config=config_of(cls, raw),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers does not document its exceptions
        problem = f"transformers cannot load it: {one_line(error)}"
        raise CheckpointError(str(folder), problem, "download the model again") from None
    for kind, what in (("missing_keys", "is missing"), ("unexpected_keys", "is not used")):
        if names := sorted(found[kind]):
            raise CheckpointError(
                str(folder),
                f"{names[0]} {what} ({len(names)} such tensors)",
                "check that config.json and the weights belong together",
            )
    return model


def _built(cls: Any, raw: Mapping[str, Any]) -> Any:
    """Build the model without initializing its weights."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        return cls(config_of(cls, raw))


class _Quantized:
    """Fills a model from a quantized folder. Quantized linears are replaced with QuantLinear."""

    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Mapping[str, str],
    ) -> None:
        self._source, self._device, self._dtype = source, device, dtype
        self._kernels = kernels
        # Weights and biases of the first layer, if the model is sharded. The layer is computed
        # whole first, to check the sharded layer against it.
        self._first: dict[str, tuple[Weight, torch.Tensor | None]] = {}

    def scheme_of(self, name: str) -> Scheme | None:
        """Return the scheme of a linear; None: the linear is float."""
        return self._source.quant.scheme_for(name) if self._source.is_quantized(name) else None

    def fill_(self, model: Any, division: Division | None) -> None:
        """Read all tensors. Linears get this rank's shards, except in the first layer."""
        source = self._source
        for name, module in list(model.named_modules()):
            if not source.is_quantized(name):
                continue
            if not isinstance(module, torch.nn.Linear):
                kind = type(module).__name__
                raise CheckpointError(
                    name,
                    f"is quantized, and transformers computes it by {kind}",
                    "quantize linears",
                )
            shape = (module.out_features, module.in_features)
            weight, bias = source.weight(name, shape), None
            if module.bias is not None:
                bias = source.tensor(f"{name}.bias", shape[:1])
            cut = WHOLE if division is None else division.cuts.get(name, WHOLE)
            if cut is not WHOLE and weight.input_order is not None:
                raise InputError(
                    "--tensor-parallel-size",
                    f"does not work through transformers with {name}, whose inputs are sorted"
                    " (desc_act)",
                    "quantize without --act-order, or serve it on one GPU",
                )
            if cut is not WHOLE and division.in_first_layer(name):
                self._first[name], cut = (weight, bias), WHOLE
            self._replace_(model, name, weight, bias, cut)
        kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        for name, value in _stored_tensors(model):
            if name in tied and name not in source.reader:
                continue
            integers = not value.is_floating_point()
            found = source.tensor(name, tuple(value.shape), integers=integers)
            target = torch.float32 if any(part in name for part in kept) else self._dtype
            value.data = found.to(target) if found.is_floating_point() else found
        model.tie_weights()
        source.audit(tuple(tied))

    def cut_first_(self, model: Any, division: Division) -> None:
        """Replace the linears of the first layer with this rank's shards."""
        for name, (weight, bias) in self._first.items():
            self._replace_(model, name, weight, bias, division.cuts[name])
        self._first.clear()

    def _replace_(
        self, model: Any, name: str, weight: Weight, bias: torch.Tensor | None, cut: LinearShard
    ) -> None:
        part, device, dtype = cut.weight(weight, name).to(self._device), self._device, self._dtype
        bias = None if bias is None else cut.bias(bias)
        bias = None if bias is None else bias.to(device, dtype)
        kernel = self._kernels.get(kernel_operation(part))
        linear = QuantLinear.for_inference(part, bias, dtype, device, kernel)
        model.set_submodule(name, QuantizedLinear(linear, part.out_features))


def _divided(
    config: ModelConfig,
    model: Any,
    division: Division,
    communicator: Communicator,
    quantized: _Quantized | None,
    call: Call,
    device: torch.device,
) -> Any:
    """Return this rank's shard of the model, on its device.

    Raises InputError if the sharded first layer does not give the same states as the whole one.
    """
    ids_T, positions_T = _text(config, torch.device("cpu") if quantized is None else device)
    model = model if quantized is None else model.to(device)
    given = division, ids_T, positions_T
    want_TC = _checked(call, first_layer_states, model, *given)
    if quantized is not None:
        quantized.cut_first_(model, division)
    cut_(model, division, communicator)
    model = model.to(device)
    given = division, ids_T.to(device), positions_T.to(device)
    found_TC = _checked(call, first_layer_states, model, *given)
    _compare(call, found_TC, want_TC.to(device), "divided layers' states")
    return model


def _text(config: ModelConfig, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of the check and their positions."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = min(sum(CHUNKS), config.context.length)
    ids_T = torch.randint(config.vocab_size, (num_tokens,), generator=generator).to(device)
    return ids_T, torch.arange(num_tokens, device=device)


def _stored_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of parameters and persistent buffers, except those of QuantLinears."""
    for prefix, module in model.named_modules():
        if isinstance(module, QuantLinear):
            continue
        buffers = module.named_buffers(recurse=False)
        own = [each for each in buffers if each[0] not in module._non_persistent_buffers_set]
        for name, tensor in [*module.named_parameters(recurse=False), *own]:
            yield f"{prefix}.{name}" if prefix else name, tensor


def _proven(
    config: ModelConfig, model: Any, call: Call, device: torch.device, kernel: str | None
) -> FallbackDecoder:
    """Determine the forms of attention calls, and compare results with transformers' attention.

    Raises InputError if they differ.
    """
    ids_T, positions_T = _text(config, device)
    num_tokens = len(ids_T)
    with torch.inference_mode():
        try:
            model.set_attn_implementation("eager")
            body = model.base_model(
                input_ids=ids_T[None],
                position_ids=positions_T[None],
                use_cache=False,
                return_dict=True,
            )
            want = model(
                input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False
            ).logits[0]
            model.set_attn_implementation(INTERFACE)
        except Exception as error:  # transformers does not document its exceptions
            raise call.refuse(one_line(error)) from None
        want_TC = body.last_hidden_state[0]
        decoder, states, start = None, [], 0
        call.scratch = []
        for count in CHUNKS:
            end = min(start + count, num_tokens)
            if start == end:
                break
            step = _step(start, end, device)
            if decoder is None:
                call.begin(step, ())
                _run(call, model, ids_T[:end], positions_T[:end])
                _check_layers(config, call)
                decoder = FallbackDecoder(config, model, call, want_TC.new_empty(0), kernel)
                caches, call.scratch = call.scratch, None
            states.append(_checked(call, decoder.forward, ids_T[start:end], step, caches))
            start = end
        hidden_TC = torch.cat(states)
        _compare(call, hidden_TC, want_TC, "hidden states")
        _compare(call, _checked(call, decoder.logits, hidden_TC), want, "logits")
        if device.type == "cuda":
            last = slice(start - 1, start)
            given = ids_T[last], _step(start - 1, start, device), caches
            decoder.no_graphs = refusal_of_graphs(decoder, given, hidden_TC[last])
    return decoder


def _run(call: Call, model: Any, ids_T: torch.Tensor, positions_T: torch.Tensor) -> None:
    inputs = {"input_ids": ids_T[None], "position_ids": positions_T[None]}
    _checked(call, model.base_model, **inputs, use_cache=False, return_dict=True)
    if not call.forms:
        raise call.refuse("it does not call the attention interface")


def _checked(call: Call, compute: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Run model code. Any exception becomes an InputError."""
    try:
        return compute(*inputs, **options)
    except InputError:
        raise
    except Exception as error:  # any error of model code that does not support this use
        raise call.refuse(one_line(error)) from error


def _step(start: int, end: int, device: torch.device) -> StepInputs:
    """Return a step with a chunk of one request, whose pages are 0, 1, ..."""
    pages = -(-sum(CHUNKS) // PAGE)
    int32 = {"dtype": torch.int32, "device": device}
    positions_T = torch.arange(start, end, device=device)
    return StepInputs(
        block_tables_RX=torch.arange(pages, **int32)[None],
        query_starts_R1=torch.tensor([0, end - start], **int32),
        context_lengths_R=torch.tensor([end], **int32),
        max_query_len=end - start,
        max_context_len=end,
        positions_T=positions_T,
        slots_T=positions_T.clone(),
    )


def _compare(call: Call, found_TC: torch.Tensor, want_TC: torch.Tensor, what: str) -> None:
    cosines_T = torch.cosine_similarity(found_TC.float(), want_TC.float(), dim=-1)
    least, share = AGREEMENT[found_TC.element_size()]
    if not (cosines_T >= least).float().mean() >= share:
        raise call.refuse(
            f"with paged attention its {what} differ from those of its own attention (smallest"
            f" cosine similarity of {len(cosines_T)} tokens: {cosines_T.min():.3g})"
        )


def _check_layers(config: ModelConfig, call: Call) -> None:
    """Refuse layers without attention, and a sliding window that is not passed to attention."""
    if len(call.forms) != config.num_layers:
        count = len(call.forms)
        raise call.refuse(f"only {count} of its {config.num_layers} layers call attention")
    kinds = config.values.get("layer_types") or ()
    others = sorted({*map(str, kinds)} - {FULL, SLIDING})
    if others:
        raise call.refuse(f"it has layers of the type {', '.join(others)}")
    window = config.values.get("sliding_window")
    if window and config.values.get("use_sliding_window", True):
        names_it = any(form.window is not None for form in call.forms)
        if not names_it and (not kinds or SLIDING in kinds):
            raise call.refuse(f"its sliding_window of {window} is not passed to attention")
