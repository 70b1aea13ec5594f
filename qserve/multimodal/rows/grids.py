"""Models that cut images of any size into patches: Qwen-VL, GLM and others."""

from formats.architecture.text_part import RANKING
from qserve.multimodal.family import VisionFamily
from qserve.multimodal.stored_forms.ernie_config import as_ernie_vl
from qserve.multimodal.stored_forms.hyperclova_config import as_hyperclova
from qserve.multimodal.stored_forms.intern_s2_config import as_qwen3_5_moe
from qserve.multimodal.stored_forms.omni_config import (
    OMNI_2_5,
    OMNI_AUDIO,
    as_omni,
    as_qwen3_vl_moe,
)
from qserve.multimodal.stored_forms.prefixes import (
    ERNIE,
    HUNYUAN,
    HYPERCLOVA,
    LFM_3,
    MINIMAX_M3,
    OMNI,
    PADDLE,
    QWEN,
    VIDEO_LLAMA,
)

# keys of ERNIE's tokens that have experts of their own
_MEDIA = tuple(
    f"{kind}_{key}"
    for kind in ("image", "video")
    for key in ("start_token_id", "token_id", "end_token_id")
)
GRIDS: tuple[VisionFamily, ...] = (
    VisionFamily(
        architecture="Exaone4_5_ForConditionalGeneration",
        layout="grid",
        encoder="patches",
        prefixes=QWEN,
    ),
    VisionFamily(
        architecture="VideoLlama3ForConditionalGeneration",
        fixed_options={"merge_size": 1},
        layout="grid",
        encoder="single_patches",
        prefixes=VIDEO_LLAMA,
    ),
    VisionFamily(
        architecture="Lfm3VlForConditionalGeneration",
        layout="grid",
        encoder="patches",
        tensors="lfm3",
        prefixes=LFM_3,
    ),
    *(
        VisionFamily(
            architecture=name,
            layout="grid",
            encoder="patches",
            config=as_hyperclova,
            prefixes=HYPERCLOVA,
        )
        for name in ("HyperCLOVAXVisionV2ForConditionalGeneration", "HCXVisionV2ForCausalLM")
    ),
    VisionFamily(
        architecture="PaddleOCRVLForConditionalGeneration",
        axis_pairs=(16, 24, 24),
        layout="grid",
        kinds_argument="mm_token_type_ids",
        encoder="square_patches",
        tensors="paddle",
        prefixes=PADDLE,
    ),
    *(
        VisionFamily(
            architecture=f"Ernie4_5_{name}ForConditionalGeneration",
            axis_pairs=(22, 22, 20),
            has_frames_last=True,
            expert_token_keys=_MEDIA,
            layout="grid",
            processor_class="Ernie4_5_VLMoeImageProcessorPil",
            kinds_argument="mm_token_type_ids",
            encoder="patches",
            config=as_ernie_vl,
            tensors="ernie",
            prefixes=ERNIE,
        )
        for name in ("VLMoe", "VL_Moe")
    ),
    VisionFamily(
        architecture="MiniMaxM3SparseForConditionalGeneration",
        image_token_keys=("image_token_index", "image_token_id"),
        layout="bracketed",
        processor_class="Qwen2VLImageProcessorPil",
        default_pixels=(4 * 28 * 28, 451_584),
        encoder="patches",
        prefixes=MINIMAX_M3,
    ),
    VisionFamily(
        architecture="HunYuanVLForConditionalGeneration",
        axis_pairs=(16, 16, 16, 16),
        counts_images=True,
        layout="lines",
        kinds_argument="mm_token_type_ids",
        encoder="patches",
        tensors="hunyuan",
        prefixes=HUNYUAN,
    ),
    *(
        VisionFamily(
            architecture=name,
            axis_pairs=(16, 24, 24),
            layout="grid",
            kinds_argument="mm_token_type_ids",
            encoder="grid",
            video=video,
            prefixes=QWEN,
        )
        for name, video in (
            ("Qwen2VLForConditionalGeneration", "qwen2"),
            ("Qwen2_5_VLForConditionalGeneration", "qwen2"),
            (RANKING, ""),
        )
    ),
    *(
        VisionFamily(
            architecture=f"{name}ForConditionalGeneration",
            axis_pairs=(24, 20, 20),
            has_interleaved_axes=True,
            layout="grid",
            kinds_argument="mm_token_type_ids",
            encoder="grid",
            video="qwen3",
            prefixes=QWEN,
        )
        for name in ("Qwen3VL", "Qwen3VLMoe", "Cosmos3", "Cosmos3Omni")
    ),
    *(
        VisionFamily(
            architecture=name,
            image_token_keys=("image_token_id", "image_token_index"),
            axis_pairs=(16, 24, 24),
            layout="grid",
            encoder="patches",
            config=as_omni,
            states_tower=False,
            audio=OMNI_AUDIO,
            prefixes=OMNI,
        )
        for name in OMNI_2_5
    ),
    *(
        VisionFamily(
            architecture=f"{name}ForConditionalGeneration",
            axis_pairs=(24, 20, 20),
            has_interleaved_axes=True,
            layout="grid",
            kinds_argument="mm_token_type_ids",
            encoder="grid",
            config=as_qwen3_vl_moe,
            states_tower=False,
            tensors="omni",
            prefixes=OMNI,
        )
        for name in ("Qwen3OmniMoe", "Qwen3OmniMoeThinker")
    ),
    *(
        VisionFamily(
            architecture=f"{name}ForConditionalGeneration",
            axis_pairs=(8, 12, 12),
            layout="grid",
            kinds_argument="mm_token_type_ids",
            encoder="patches",
            prefixes=QWEN,
        )
        for name in ("Glm4v", "Glm4vMoe", "Glm46V", "GlmOcr")
    ),
    *(
        VisionFamily(
            architecture=f"{name}ForConditionalGeneration",
            axis_pairs=(11, 11, 10),
            has_interleaved_axes=True,
            layout="grid",
            kinds_argument="mm_token_type_ids",
            encoder="grid",
            video="qwen3",
            config=config,
            prefixes=QWEN,
        )
        for name, config in (
            ("Qwen3_5", None),
            ("Qwen3_5Moe", None),
            ("InternS2Preview", as_qwen3_5_moe),
        )
    ),
)
