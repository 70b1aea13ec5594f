"""Run a float model one decoder layer at a time, with transformers' layer classes or RowLayer.

A layer is built from its class and config.json without memory (meta device), gets its tensors, runs
over the hidden states of all windows, and is dropped. Positions and masks are passed explicitly,
because the full model is never built.

Legend: W windows, S tokens of a window, D hidden size, V vocabulary.
"""

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

from calibrate.calibration.adapter import put_beside
from calibrate.calibration.carried import carried_of
from calibrate.calibration.modules import (
    MEDIA_MIXTURES,
    AlwaysActive,
    Experts,
    ScaledMixture,
    with_gate_and_up,
    with_linears,
    with_media_routers,
)
from calibrate.calibration.rotary import rotary_by_theta, with_axes, without_states
from calibrate.calibration.row_layer import RowLayer
from calibrate.calibration.vision import (
    Media,
    axis_positions,
    mutual_mask,
    with_added,
)
from calibrate.float_model import FloatModel
from calibrate.layer_map import LayerMap
from formats.architecture.flags import is_set
from formats.checkpoint import CheckpointReader
from formats.errors import COPY_CONFIG, DOWNLOAD_BOTH, CheckpointError, InputError, one_line
from formats.numerics.alibi import alibi_slopes
from formats.numerics.sinusoids import sinusoids

# Family.defaults_of -> transformers' class whose rotary embedding RowLayer uses: one for parts of
# heads, one with RoPE parameters for each layer type, and one for latents
ROTARY_CLASSES = {
    **{"llama": "StableLmForCausalLM", "gemma3_text": "Gemma3ForCausalLM"},
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
WINDOWS = ("sliding_attention", "hybrid_sliding")  # types of layers; the second is Inkling's
Rounding = Callable[[torch.Tensor], torch.Tensor]  # applied to a linear's input


class LayerRunner:
    """Builds and runs the decoder layers of one model."""

    def __init__(
        self,
        reader: FloatModel | CheckpointReader,
        layer_map: LayerMap,
        device: str,
        axis_rotary: nn.Module | None = None,
    ) -> None:
        """`axis_rotary`: rotary embedding for positions with three axes (vision-language models).

        Raises CheckpointError if transformers does not support the model's config.
        """
        self._axis_rotary = None if axis_rotary is None else axis_rotary.to(device)
        self.layer_map, self.device, self.raw_config = layer_map, device, reader.config
        self._adapter = reader.adapter if isinstance(reader, FloatModel) else None
        # A copy: transformers adds keys to the config's parts.
        raw, row = copy.deepcopy(dict(reader.config)), layer_map.family
        architecture, model_type = raw["architectures"][0], raw.pop("model_type", None)
        try:
            config = transformers.AutoConfig.for_model(row.defaults_of or model_type, **raw)
            name = ROTARY_CLASSES.get(row.defaults_of, row.class_in_transformers or architecture)
            model_class = getattr(transformers, name)
        except (KeyError, ValueError, AttributeError) as error:
            raise CheckpointError(
                str(reader.folder / "config.json"),
                f"transformers {transformers.__version__} cannot read it: {one_line(error)}",
                "calibration runs the float model's layers; use the recipe rtn, which does not",
            ) from None
        if row.defaults_of == "deepseek_v3":  # its rotary embedding has head_dim channels
            config.head_dim = config.qk_rope_head_dim
        # Soft caps, sinks, ALiBi and GPT-J's RoPE need transformers' "eager" attention.
        capped = getattr(config, "attn_logit_softcapping", None) is not None
        plain = row.sinks or row.rotary_dim_key or row.alibi or not model_class._supports_sdpa
        self.eager = capped or bool(plain)
        config._attn_implementation = "eager" if self.eager else "sdpa"
        self.config = config
        module = importlib.import_module(model_class.__module__)
        family = name
        for suffix in ("ForCausalLM", "LMHeadModel", "TextModel"):
            family = family.removesuffix(suffix)
        # of layers with attention, and of those with a state
        kinds = ("DecoderLayer", "TextDecoderLayer", "Layer", "Block")
        self._layer_classes = tuple(
            next(each for name in names if (each := getattr(module, f"{family}{name}", None)))
            for names in (
                (*kinds, "AttentionDecoderLayer"),
                (*kinds, "LinearAttentionDecoderLayer", "MambaDecoderLayer"),
            )
        )
        self._mamba_factors = getattr(module, "compute_mup_vector", None)
        self._rotary = None
        self._by_theta: dict[float, nn.Module] = {}  # for families with a theta per layer
        stated = self.raw_config.get("rotary_dim")
        if row.model_type == "minimax" and stated not in (None, self.raw_config.get("head_dim")):
            raise InputError(
                "config.json rotary_dim",
                f"transformers rotates all of a head, not {stated} channels",
                "use `recipe` rtn",
            )
        # Layers of families with a rotary_dim_key compute their rotary embeddings themselves.
        if row.rotates(vars(config)) and not row.rotary_dim_key:
            # In vision-language models the class has another name.
            rotary = getattr(module, f"{family}RotaryEmbedding", None)
            rotary = rotary or getattr(module, f"{family}TextRotaryEmbedding")
            own = without_states(config, row) if row.defaults_of else config
            if row.experts and row.experts.media_inner:
                own = with_axes(config)
            self._rotary = rotary(own).to(device)
            if row.theta_key:
                self._by_theta = rotary_by_theta(rotary, config, row.theta_key, device)
        # A CPU computes in float32; a GPU in the model's 16-bit dtype, with float32 statistics.
        table = reader.entries.get(layer_map.embedding)  # None: the embedding is quantized
        stored = (table or reader.entries[layer_map.last_norm]).dtype
        self.dtype = stored if torch.device(device).type == "cuda" else torch.float32
        self._positions: dict[tuple[int, str, float | None], Any] = {}
        # Position embeddings [S, D] that are added to the embeddings; None: the model has none.
        self.positions_SD: torch.Tensor | None = None
        if row.positions is not None:
            if row.positions.name:
                table = reader.get(row.positions.name)
            else:
                sizes = row.sizes(reader.config)
                zero = getattr(config, "pad_token_id", None)
                table = sinusoids(sizes["positions"], sizes["hidden_size"], zero)
            self.positions_SD = table[row.positions.offset :].to(device, self.dtype)
        self._embedding_norm: nn.Module | None = None
        if row.plain_embedding_norm:
            self._embedding_norm = self._norm(None, None)
        elif row.embedding_norm:
            bias = reader.get(row.embedding_norm_bias) if row.norm_bias else None
            weight = reader.get(row.embedding_norm) if row.norm_weights else None
            self._embedding_norm = self._norm(weight, bias)
        # Extra channels that layers read besides hidden states; None: none.
        values = {**config.to_dict(), **self.raw_config}
        self.carried = carried_of(reader, layer_map, values, device, self.dtype)
        self._last_norm_bias = reader.get(row.last_norm_bias) if row.norm_bias else None
        self._head_bias = reader.get(row.head_bias_name) if row.head_bias else None

    def build(
        self,
        layer: int,
        state: Mapping[str, torch.Tensor],
        activation: Rounding | Mapping[str, Rounding] | None = None,
        all_experts: bool = False,
    ) -> nn.Module:
        """Build the layer as a module with the tensors `state`, in the computing dtype.

        `activation`: a rounding of the inputs of all linears, such as fake_quantize_tokens, or
        roundings by name of the linear. `all_experts`: run every token through every expert, so
        that hooks see it there; the layer's output is still that of the routed experts.
        """
        with torch.device("meta"):
            module = with_linears(self._make_layer(layer))
            module = with_gate_and_up(module, self.layer_map.family)
            second: tuple[str, ...] = ()  # prefixes of second names of modules with two names
            stored: dict[str, str] = {}  # name in transformers -> name in the checkpoint
            if self.layer_map.has_own_linears(self.raw_config, layer):
                experts = self.layer_map.experts
                own = experts.module if hasattr(module, experts.module or "-") else "mlp"
                own = own if experts.module else ""  # the layer itself
                mixture = module.get_submodule(own)
                mixture.experts = self._experts(mixture, layer, all_experts)
                if experts.always is not None:
                    AlwaysActive(mixture).replace()
                if experts.scaled_inputs:
                    mixture = ScaledMixture(mixture)
                    setattr(module, own, mixture)
                if own:
                    setattr(module, experts.module, mixture)
                # If a module has two names, the checkpoint's name counts.
                second = () if experts.module == own else (f"{own}.",)
                if experts.media_inner:
                    second = (*second, *(f"{own}.{name}.experts." for name in MEDIA_MIXTURES))
                    state = with_media_routers(state, experts)
            for name, theirs in self.layer_map.family.names_in_transformers.items():
                modules = dict(module.named_modules(remove_duplicate=False))
                if theirs in modules:
                    parent, _, leaf = name.rpartition(".")
                    setattr(module.get_submodule(parent), leaf, modules[theirs])
                    second = (*second, f"{theirs}.")
                else:
                    stored[theirs] = name
        for joined, parts in self.layer_map.family.joined_in_transformers.items():
            if parts[0] in state:
                state = {**state, joined: torch.cat([state[part] for part in parts])}
        tables = self.layer_map.family.masks  # always computed, even if a file has them
        built = {
            name: weight
            for name, weight in module.state_dict().items()
            if not name.startswith(second) and name not in tables
        }
        wanted = {name: stored.get(name, name) for name in built}
        missing = [name for name in wanted.values() if name not in state]
        if missing:
            raise CheckpointError(
                f"{self.layer_map.prefix(layer)}.{missing[0]}",
                "is missing, but transformers' layer has it",
                DOWNLOAD_BOTH,
            )
        for name, own in wanted.items():
            if state[own].shape != built[name].shape:
                raise CheckpointError(
                    f"{self.layer_map.prefix(layer)}.{own}",
                    f"config.json states {list(built[name].shape)}, found {list(state[own].shape)}",
                    COPY_CONFIG,
                )
        given = {
            name: state[own].to(self.device, self.dtype if state[own].is_floating_point() else None)
            for name, own in wanted.items()
        }
        module.load_state_dict(given, assign=True, strict=not (second or tables))
        if self.layer_map.family.rope_keys:  # compressors have rotary embeddings of their own
            for name, each in list(module.named_modules()):
                if isinstance(each, type(self._rotary)):
                    parent, _, leaf = name.rpartition(".")
                    setattr(module.get_submodule(parent), leaf, self._rotary)
        if any(buffer.is_meta for buffer in module.buffers()):
            self._fill_buffers(module, layer)
        if self._adapter is not None:
            prefix = self.layer_map.prefix(layer)
            put_beside(module, prefix, self._adapter, self.dtype, self.device)
        if activation is not None:
            for group in self.layer_map.inputs(self.raw_config, layer):
                for name in group:
                    rounding = activation if callable(activation) else activation.get(name)
                    if rounding is not None:
                        module.get_submodule(name).register_forward_pre_hook(
                            lambda _, args, rounding=rounding: (rounding(args[0]),)
                        )
        return module.train(False).requires_grad_(False)

    def _experts(self, mixture: nn.Module, layer: int, all_tokens: bool) -> nn.Module:
        """Return the experts of a mixture, which has them under the checkpoint's names."""
        given = self.layer_map, self.config, self.raw_config, layer, all_tokens
        if not self.layer_map.experts.media_inner:
            return Experts(*given)
        found: list[nn.Module] = []
        for name, of_media in zip(MEDIA_MIXTURES, (False, True), strict=True):
            own = mixture.get_submodule(name)
            own.experts = Experts(*given, of_media=of_media)
            found += (own.experts[number] for number in range(own.experts.count))
        return nn.ModuleList(found)

    def _fill_buffers(self, module: nn.Module, layer: int) -> None:
        """Fill in buffers that a layer computes when it is built, and that no file has."""
        for name, buffer in self._make_layer(layer).named_buffers():
            parent, _, leaf = name.rpartition(".")
            if module.get_buffer(name).is_meta:
                setattr(module.get_submodule(parent), leaf, buffer.to(self.device))

    def _layer_class(self, layer: int) -> type[nn.Module]:
        """Return the class of a layer: transformers', or one that builds it from the row."""
        if self.layer_map.family.defaults_of:
            return RowLayer
        has_state = self.layer_map.has_state(self.raw_config, layer)
        return self._layer_classes[has_state]

    def _make_layer(self, layer: int) -> nn.Module:
        """Build an empty layer. Raises CheckpointError if transformers cannot."""
        row = self.layer_map.family
        if row.defaults_of:
            return RowLayer(row, {**self.config.to_dict(), **self.raw_config}, layer)
        try:
            made = self._layer_class(layer)(self.config, layer)
            if self._mamba_factors is not None:  # the model registers them, not the layer
                factors = self._mamba_factors(self.config)
                made.mamba.register_buffer("mup_vector", factors, persistent=False)
            return made
        # What layers raise on config values that passed our checks.
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                "config.json",
                f"transformers cannot build a layer from it: {type(error).__name__} {error}",
                f"{COPY_CONFIG}, or use `recipe` rtn, which runs no layers",
            ) from None

    def run(
        self,
        module: nn.Module,
        layer: int,
        hidden_BSD: torch.Tensor,
        cache: Any = None,
        grad: bool = False,
        media: Media = (),
    ) -> torch.Tensor:
        """Run one layer on a batch of whole windows and return its outputs.

        `cache` observes or rounds keys and values (kv_range.py). `media`: images of each window, or
        (): no images.
        """
        length = hidden_BSD.shape[1]
        kind = self._kind(layer)
        theta = getattr(self.config, self.layer_map.family.theta_key or "-", None)
        theta = None if theta is None else theta[layer]
        if (length, kind, theta) not in self._positions:
            ids_1S = torch.arange(length, device=self.device)[None]
            rotary, blocks = None, self.layer_map.family.blocks(self.raw_config, layer)
            if theta is not None:
                rotary = self._by_theta[theta](hidden_BSD[:1], ids_1S) if theta else None
            elif self._rotary is not None:
                # One rotary embedding per attention type (Gemma 3), or one for all layers.
                by_kind = "layer_type" in inspect.signature(self._rotary.forward).parameters
                if self.layer_map.family.rope_keys:
                    keys = set(self.layer_map.family.rope_keys.values())
                    rotary = {key: self._rotary(hidden_BSD[:1], ids_1S, key) for key in keys}
                elif blocks.attention or not by_kind:
                    rotary = self._rotary(hidden_BSD[:1], ids_1S, *((kind,) if by_kind else ()))
            mask = self._mask(length, kind) if blocks.attention else None
            self._positions[length, kind, theta] = (ids_1S, rotary, mask)
        position_ids, rotary, mask = self._positions[length, kind, theta]
        if any(each is not None for each in media):
            if self._axis_rotary is not None:
                rotary = self._axis_rotary(hidden_BSD, axis_positions(media, length, self.device))
            has_window = kind == "sliding_attention"
            if any(
                e is not None and e.is_mutual and (has_window or not e.in_windows) for e in media
            ):
                window = self.config.sliding_window if has_window else length
                mask = mutual_mask(media, length, window, self.device, self.dtype)
        accepted = inspect.signature(self._layer_class(layer).forward).parameters
        cache_name = "layer_past" if "layer_past" in accepted else "past_key_values"
        others: dict[str, Any] = {"alibi": None} if "alibi" in accepted else {}
        if self.layer_map.family.alibi and not self.layer_map.family.defaults_of:
            others, mask = self._biases(hidden_BSD, mask, "alibi" in accepted)
        elif self.eager and mask is not None:  # XGLM's layers check its shape
            mask = mask.expand(len(hidden_BSD), -1, -1, -1)
        indexer = self.layer_map.family.indexer
        is_read = indexer is not None and indexer.shared
        if is_read and not indexer.is_in(layer, self.raw_config):
            others["prev_topk_indices"] = self._all_keys(hidden_BSD)
        kinds = [None if each is None else each.is_expert_S for each in media]
        if any(each is not None for each in kinds):
            plain_S = torch.zeros(length, dtype=torch.bool)
            of_tokens = [plain_S if each is None else each for each in kinds]
            others["moe_mm_token_type_ids"] = torch.stack(of_tokens).to(self.device)
        inputs_BSD = hidden_BSD
        if self.carried is not None:
            others = self.carried.arguments(hidden_BSD, layer)
            inputs_BSD = self.carried.inputs(hidden_BSD, layer)
        with torch.set_grad_enabled(grad):
            output = module(
                inputs_BSD,
                attention_mask=mask,
                position_ids=position_ids,
                position_embeddings=rotary,
                use_cache=False,
                **{cache_name: cache},
                **others,
            )
        output = output[0] if isinstance(output, tuple) else output
        if self.carried is not None:
            with torch.set_grad_enabled(grad):
                return self.carried.joined(output, hidden_BSD, layer, others)
        return with_added(output, layer, media)

    def _all_keys(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Return the key indices that an earlier layer's indexer would select: all keys.

        Raises InputError for windows so long that the indexer would leave keys out.
        """
        key = self.layer_map.family.indexer.count_key
        (B, S), most = hidden_BSD.shape[:2], getattr(self.config, key)
        if most < S:
            raise InputError(
                f"windows of {S} tokens",
                f"expected at most {key}, {most}",
                "use a smaller `sequence_length`",
            )
        return torch.arange(S, dtype=torch.int32, device=self.device).expand(B, S, S)

    def _biases(
        self, hidden_BSD: torch.Tensor, mask: torch.Tensor, by_name: bool
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return ALiBi's biases as layer arguments, and the mask in the form that the layer takes.

        `by_name`: in the form of BLOOM and Falcon; otherwise in that of MPT.
        """
        heads = self.raw_config["num_attention_heads"]
        slopes = torch.tensor(alibi_slopes(heads), device=self.device)
        ids_S = torch.arange(hidden_BSD.shape[1], device=self.device)
        biases_H1S = slopes[:, None, None] * ids_S
        if by_name:
            return {"alibi": biases_H1S.repeat(len(hidden_BSD), 1, 1).to(self.dtype)}, mask
        return {"position_bias": biases_H1S}, mask != 0

    def final_logits(
        self,
        hidden_SD: torch.Tensor,
        norm_D: torch.Tensor,
        head_VD: torch.Tensor,
        grad: bool = False,
    ) -> torch.Tensor:
        """Apply the last norm, the head, and the model's logit divisor, factor and soft cap."""
        family = self.layer_map.family
        with torch.set_grad_enabled(grad):
            logits_SV = (
                self.head_inputs(hidden_SD, norm_D) @ head_VD.to(self.device, self.dtype).t()
            )
            if self._head_bias is not None:
                logits_SV = logits_SV + self._head_bias.to(self.device, self.dtype)
        divisor = getattr(self.config, family.logits_divisor_key or "-", None)
        factor = getattr(self.config, family.logits_factor_key or "-", None)
        cap = getattr(self.config, family.logits_cap_key or "-", None)
        logits_SV = logits_SV if divisor is None else logits_SV / divisor
        logits_SV = logits_SV if factor is None else logits_SV * factor
        return logits_SV if cap is None else torch.tanh(logits_SV / cap) * cap

    def head_inputs(self, hidden_SD: torch.Tensor, norm_D: torch.Tensor) -> torch.Tensor:
        """Return the last norm's outputs, which the head reads, for any leading dimensions."""
        hidden_SD = hidden_SD if self.carried is None else self.carried.merged(hidden_SD)
        return self._norm(norm_D, self._last_norm_bias)(hidden_SD)

    def _norm(self, weight_D: torch.Tensor | None, bias_D: torch.Tensor | None) -> nn.Module:
        """Return a norm of the class that layers use, with the given weight and bias."""
        family, config = self.layer_map.family, self.raw_config
        if family.plain_embedding_norm:  # norms outside of layers are of another class than theirs
            plain = nn.RMSNorm(config["hidden_size"], family.norm_eps(config), device=self.device)
            if weight_D is not None:
                plain.weight.data = weight_D.to(self.device, self.dtype)
            return plain.requires_grad_(False)
        blocks = family.blocks(config, 0)
        with torch.device("meta"):
            name = next(
                norm.name
                for norm in family.norms
                if is_set(norm.present, config) and norm.is_in(blocks)
            )
            name = family.names_in_transformers.get(name, name)
            norm = self._make_layer(0).get_submodule(name)
        state = {"weight": weight_D, "bias": bias_D}
        own = norm.state_dict()  # empty where norms have no weights
        given = {
            n: t.to(self.device, self.dtype) for n, t in state.items() if t is not None and n in own
        }
        norm.load_state_dict(given, assign=True)
        return norm.requires_grad_(False)

    def first_states(
        self, ids_S: torch.Tensor, rows_SD: torch.Tensor, is_image_S: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the first layer's input, from the embeddings `rows_SD` of tokens and images."""
        if self._embedding_norm is not None:
            rows_SD = self._embedding_norm(rows_SD.to(self.device)).to(rows_SD.device)
        return rows_SD if self.carried is None else self.carried.start(ids_S, rows_SD, is_image_S)

    @property
    def num_carried(self) -> int:
        """Number of carried channels after the hidden size."""
        return 0 if self.carried is None else self.carried.width

    def keeps_keys(self, layer: int) -> bool:
        """True if a layer has keys and values of its own, and no recurrent state."""
        is_shared = self.layer_map.family.kv_source(layer, self.raw_config) is not None
        return not (is_shared or self.layer_map.has_state(self.raw_config, layer))

    def _kind(self, layer: int) -> str:
        row, kinds = self.layer_map.family, getattr(self.config, "layer_types", None)
        if row.defaults_of and row.window == "none":  # some files state unused windows
            return "full_attention"
        if kinds:
            return kinds[layer]
        sliding = getattr(self.config, "sliding_window", None)
        return "sliding_attention" if sliding else "full_attention"

    def _mask(self, length: int, kind: str) -> torch.Tensor | None:
        """Return the additive attention mask [1, 1, S, S], or None for plain causal attention."""
        has_window = kind in WINDOWS or self.layer_map.family.rope_keys
        window = self.config.sliding_window if has_window else None
        chunk = self.config.attention_chunk_size if kind == "chunked_attention" else None
        selects = self.layer_map.family.indexer is not None  # an indexer reads the mask
        if not (self.eager or selects) and (window or chunk or length) >= length:
            return None
        ids_S = torch.arange(length, device=self.device)
        distance_SS = ids_S[:, None] - ids_S
        seen_SS = (distance_SS >= 0) & (distance_SS < (window or length))
        if chunk is not None:
            seen_SS &= ids_S[:, None] // chunk == ids_S // chunk
        mask_SS = torch.zeros(length, length, dtype=self.dtype, device=self.device)
        return mask_SS.masked_fill_(~seen_SS, torch.finfo(self.dtype).min)[None, None]
