"""Paged attention for transformers' attention interface.

T: tokens of the step. H: heads. J: KV heads. D: channels of a head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from formats.errors import InputError
from qkernels import ops
from qserve.model.blocks.attention import PagedKvSpec, StepInputs
from qserve.model.blocks.linear import Product
from qserve.model.cache_spec import Cache, KvFormat

INTERFACE = "qserve_paged"  # name under which transformers finds this attention
_SITE = "_qserve_site"  # attribute of attention modules that holds their _Site
# Arguments that do not affect scores, or that the paged cache or the call's form covers
_KNOWN = {
    *("position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"),
    *("return_dict", "position_embeddings", "past_key_values", "is_causal", "logits_to_keep"),
    *("sliding_window", "softcap", "s_aux", "output_router_logits"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """Parameters of a layer's attention call."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of keys
    value_dim: int  # at most head_dim; pages store values with the width of keys, padded with 0
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool


@dataclass(slots=True, eq=False)
class Call:
    """The step that the model is computing, and the forms of its attention calls."""

    architecture: str
    step: StepInputs | None = None
    caches: Sequence[Cache] = ()
    forms: list[CallForm] = field(default_factory=list)  # of each layer, in order
    num_done: int = 0  # attention calls made in this step
    # Only while the forms are being determined: temporary pages, one cache per call.
    scratch: "list[Cache] | None" = None

    def begin(self, step: StepInputs, caches: Sequence[Cache]) -> None:
        """Start a step."""
        self.step, self.caches, self.num_done = step, caches, 0

    def refuse(self, problem: str) -> InputError:
        return InputError(
            self.architecture,
            f"cannot run through transformers: {problem}",
            "use a model of a family that `qserve families` lists",
        )


@dataclass(slots=True, eq=False)
class _Site:
    """An attention module of the model."""

    call: Call
    index: int | None = None  # number of the layer; None before the first call


class PagedAttention(torch.nn.Module):
    """Describes the attention of one layer to the runner. The transformers model computes it."""

    has_kv_scales = False

    def __init__(self, form: CallForm, kernel: str | None) -> None:
        super().__init__()
        self.form, self.kernel = form, kernel

    def products(self) -> Iterator[Product]:
        return iter(())

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> PagedKvSpec:
        """Return the spec of the layer's pages. Raises InputError for 4-bit pages."""
        kv_format.refuse_int4("transformers computes its layers, whose queries are not rotated")
        form = self.form
        return PagedKvSpec(
            kv_format=kv_format,
            page_size=page_size,
            num_heads=form.num_heads,
            num_kv_heads=form.num_kv_heads,
            head_dim=form.head_dim,
            window=form.window,
            has_soft_cap=form.soft_cap is not None,
            has_sinks=form.has_sinks,
            kernel=self.kernel,
            scales=None,
        )


def attach(model: torch.nn.Module, call: Call) -> None:
    """Register this attention with transformers, and connect the model's modules to `call`."""
    from transformers import AttentionInterface

    AttentionInterface.register(INTERFACE, _attend)
    for module in model.modules():
        object.__setattr__(module, _SITE, _Site(call))


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Write keys and values to pages and attend to the pages. transformers calls this function.

    `query`: [1, H, T, D]. `key`, `value`: [1, J, T, D]. Returns [1, T, H, D].
    """
    site: _Site = getattr(module, _SITE)
    call = site.call
    q_THD, k_TJD, v_TJD = (each[0].transpose(0, 1) for each in (query, key, value))
    if call.scratch is not None and call.num_done == len(call.scratch):
        _find_form(site, q_THD, k_TJD, v_TJD, attention_mask, scaling, options)
    index = call.num_done
    if site.index != index:
        raise call.refuse("its layers do not each call attention once in a fixed order")
    form, cache = call.forms[index], (call.scratch or call.caches)[index]
    call.num_done += 1
    sinks = options.get("s_aux")
    v_TJD = functional.pad(v_TJD, (0, form.head_dim - form.value_dim))
    ops.write_kv_(k_TJD.contiguous(), v_TJD.contiguous(), cache, call.step.slots_T)
    out_THD = ops.paged_attention(
        q_THD.contiguous(),
        cache,
        call.step,
        scale=form.scale,
        window=form.window,
        soft_cap=form.soft_cap,
        sinks_H=None if sinks is None else sinks.float(),
    )
    return out_THD[None, ..., : form.value_dim], None


def _find_form(
    site: _Site,
    q_THD: torch.Tensor,
    k_TJD: torch.Tensor,
    v_TJD: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    options: dict[str, Any],
) -> None:
    """Determine the form of a layer's call and create temporary pages. Raises InputError."""
    call = site.call
    unknown = sorted(name for name in options.keys() - _KNOWN if options[name] is not None)
    if unknown:
        raise call.refuse(f"its attention uses the unsupported {', '.join(unknown)}")
    if mask is not None:
        raise call.refuse("its attention has a mask of its own")
    if options.get("is_causal") is False:
        raise call.refuse("its attention is not causal")
    is_wide = v_TJD.shape[-1] > k_TJD.shape[-1]
    if is_wide or k_TJD.shape[:2] != v_TJD.shape[:2] or q_THD.shape[-1] != k_TJD.shape[-1]:
        raise call.refuse("its values are wider than its keys, or its queries have another width")
    if site.index is not None:
        raise call.refuse("a layer calls attention twice")
    num_heads, num_kv_heads = q_THD.shape[1], k_TJD.shape[1]
    if num_heads % num_kv_heads:
        raise call.refuse(f"{num_heads} heads are no multiple of {num_kv_heads} key/value heads")
    window, cap = options.get("sliding_window"), options.get("softcap")
    form = CallForm(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=q_THD.shape[2],
        value_dim=v_TJD.shape[2],
        scale=q_THD.shape[2] ** -0.5 if scaling is None else float(scaling),
        window=window or None,
        soft_cap=cap or None,
        has_sinks=options.get("s_aux") is not None,
    )
    site.index = len(call.forms)
    call.forms.append(form)
    spec = PagedAttention(form, None).cache_spec(KvFormat(dtype=k_TJD.dtype), 16)
    num_pages = int(call.step.block_tables_RX.max()) + 1
    call.scratch.append(spec.make(num_pages, 0, k_TJD.device))
