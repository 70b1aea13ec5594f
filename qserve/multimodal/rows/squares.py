"""Models of square images or tiles, and models of images of any size without grids."""

from formats.architecture.text_part import WITH_OUTPUT_WINDOW
from qserve.multimodal.family import VisionFamily
from qserve.multimodal.stored_forms.deepseek_config import (
    as_deepseek_ocr,
    as_deepseek_ocr_2,
    as_unlimited_ocr,
)
from qserve.multimodal.stored_forms.internvl_config import as_internvl
from qserve.multimodal.stored_forms.kimi_config import as_kimi_k25
from qserve.multimodal.stored_forms.nemotron import NEMOTRON_OMNI, as_nemotron_omni
from qserve.multimodal.stored_forms.phi4_config import SMALL_AUDIO, as_phi4
from qserve.multimodal.stored_forms.prefixes import (
    DEEPSEEK,
    DEEPSEEK_OCR,
    GEMMA_4,
    GEMMA_4_UNIFIED,
    IDEFICS,
    INTERNVL_CHAT,
    KIMI,
    LIGHT_ON,
    LLAMA_4,
    LLAVA,
    MINICPM,
    MUSE,
    NEMOTRON,
    NEWLINE,
    PHI_4,
    STEP,
)
from qserve.text.image_text import IMAGE, IMAGE_TEXTS

SQUARES: tuple[VisionFamily, ...] = (
    VisionFamily(
        architecture="Idefics2ForConditionalGeneration",
        layout="idefics2",
        encoder="resampled",
        prefixes=IDEFICS,
    ),
    *(
        VisionFamily(
            architecture=f"{name}ForConditionalGeneration",
            layout="tiles",
            encoder="tiles",
            prefixes=IDEFICS,
        )
        for name in ("Idefics3", "SmolVLM")
    ),
    *(
        VisionFamily(
            architecture=f"{name}ForConditionalGeneration",
            image_token_keys=("image_token_id", "image_token_index"),
            layout="square",
            encoder="square",
            towers={"pixtral": ("rows", "rows")} if name == "Llava" else {},
            prefixes=LLAVA,
        )
        for name in ("Llava", "VipLlava")
    ),
    VisionFamily(
        architecture="DeepseekVLForConditionalGeneration",
        layout="square",
        encoder="square",
        prefixes=DEEPSEEK,
    ),
    VisionFamily(
        architecture="GotOcr2ForConditionalGeneration",
        image_token_keys=("image_token_id", "image_token_index"),
        fixed_options={"crop_to_patches": False},
        layout="square",
        encoder="square",
        prefixes=LLAVA,
    ),
    VisionFamily(
        architecture="JanusForConditionalGeneration",
        layout="janus",
        encoder="square",
        prefixes=DEEPSEEK,
    ),
    VisionFamily(
        architecture="LlavaNextForConditionalGeneration",
        image_token_keys=("image_token_id", "image_token_index"),
        layout="next",
        encoder="squares",
        prefixes=LLAVA | NEWLINE,
    ),
    VisionFamily(
        architecture="LlavaOnevisionForConditionalGeneration",
        image_token_keys=("image_token_id", "image_token_index"),
        layout="one_vision",
        encoder="squares",
        prefixes=LLAVA | NEWLINE,
    ),
    VisionFamily(
        architecture="InternVLForConditionalGeneration",
        layout="intern_tiles",
        encoder="square",
        prefixes=LLAVA,
    ),
    VisionFamily(
        architecture="InternVLChatModel",
        image_token_keys=(),
        placeholder=IMAGE_TEXTS["InternVLChatModel"].own,
        image_processor="internvl",
        layout="intern_cuts",
        encoder="square",
        config=as_internvl,
        tensors="internvl",
        prefixes=INTERNVL_CHAT,
    ),
    VisionFamily(
        architecture="QianfanOCRForConditionalGeneration",
        layout="intern_tiles",
        encoder="square",
        tensors="qianfan",
        prefixes=INTERNVL_CHAT,
    ),
    VisionFamily(
        architecture="AyaVisionForConditionalGeneration",
        image_token_keys=("image_token_id", "image_token_index"),
        layout="aya_tiles",
        encoder="square",
        prefixes=LLAVA,
    ),
    VisionFamily(
        architecture="Lfm2VlForConditionalGeneration",
        image_token_keys=("image_token_id", "image_token_index"),
        image_processor="lfm2_vl",
        layout="lfm2",
        encoder="any_size",
        prefixes=LLAVA,
    ),
    VisionFamily(
        architecture="Llama4ForConditionalGeneration",
        image_token_keys=("image_token_id", "image_token_index"),
        placeholder="<|image|>",
        image_processor="llama4",
        layout="llama4",
        encoder="llama4",
        prefixes=LLAMA_4,
    ),
    *(
        VisionFamily(
            architecture=f"{name}ForCausalLM",
            image_processor="phi4",
            layout="phi4",
            encoder="phi4",
            config=as_phi4,
            states_tower=name != "Phi4MM",
            tensors="phi4",
            audio=SMALL_AUDIO,
            prefixes=PHI_4,
        )
        for name in ("Phi4Multimodal", "Phi4MM")
    ),
    VisionFamily(
        architecture="MiniCPMV4_6ForConditionalGeneration",
        layout="minicpm",
        encoder="slices",
        prefixes=MINICPM,
    ),
    VisionFamily(
        architecture="MiniCPMOcrForConditionalGeneration",
        processor_class="MiniCPMV4_6ImageProcessorPil",
        fixed_options={"small_image_upsize": "always"},  # "adaptive" needs OpenCV
        layout="minicpm",
        encoder="slices",
        prefixes=MINICPM,
    ),
    VisionFamily(
        architecture="Cohere2VisionForConditionalGeneration",
        image_processor="cohere2_vision",
        layout="cohere2",
        encoder="square",
        prefixes=LLAVA,
    ),
    *(
        VisionFamily(
            architecture=f"{name}ForConditionalGeneration",
            image_processor=processor,
            layout="kimi",
            encoder="kimi",
            config=as_kimi_k25,
            tensors="kimi",
            prefixes=KIMI,
        )
        for name, processor in (
            ("KimiVL", "kimi_vl"),
            ("KimiK25", "kimi"),
            ("Kimi_K25", "kimi"),  # transformers' name
        )
    ),
    VisionFamily(
        architecture="Gemma3ForConditionalGeneration",
        image_token_keys=("image_token_id", "image_token_index"),
        placeholder_key="boi_token_index",
        layout="framed_square",
        encoder="square",
        is_mutual=True,
        kinds_argument="token_type_ids",
        joins_newlines=True,
        prefixes=LLAVA,
    ),
    VisionFamily(
        architecture="PaliGemmaForConditionalGeneration",
        image_token_keys=("image_token_index", "image_token_id"),
        layout="prompt_squares",
        encoder="prompt_squares",
        has_mutual_prompt=True,
        prefixes=LLAVA,
    ),
    VisionFamily(
        architecture="Gemma4ForConditionalGeneration",
        layout="pooled",
        encoder="pooled",
        has_mutual_windows=True,
        kinds_argument="mm_token_type_ids",
        prefixes=GEMMA_4,
    ),
    VisionFamily(
        architecture="Gemma4UnifiedForConditionalGeneration",
        image_processor="gemma4_unified",
        layout="large_patches",
        encoder="pooled",
        states_mutual=True,
        kinds_argument="mm_token_type_ids",
        prefixes=GEMMA_4_UNIFIED,
    ),
    VisionFamily(
        architecture="MuseGlimmerForConditionalGeneration",
        image_processor="muse_glimmer",
        layout="muse",
        encoder="muse",
        prefixes=MUSE,
    ),
    *(
        VisionFamily(
            architecture=name,
            image_token_keys=("image_token_id", "img_context_token_id"),
            image_processor="nemotron",
            layout="nemotron",
            encoder="radio",
            config=as_nemotron_omni,
            auto_class="AutoModelForImageTextToText",
            tensors="nemotron",
            prefixes=NEMOTRON,
        )
        for name in NEMOTRON_OMNI
    ),
    VisionFamily(
        architecture="Step3p7ForConditionalGeneration",
        image_processor="step",
        layout="step",
        encoder="step",
        tensors="step",
        prefixes=STEP,
    ),
    VisionFamily(
        architecture="Mistral3ForConditionalGeneration",
        image_token_keys=("image_token_id", "image_token_index"),
        layout="rows",
        encoder="rows",
        prefixes=LLAVA,
    ),
    VisionFamily(
        architecture="LightOnOcrForConditionalGeneration",
        layout="plain_rows",
        encoder="rows",
        prefixes=LIGHT_ON,
    ),
    *(
        VisionFamily(
            architecture=architecture,
            image_token_keys=(),
            placeholder=IMAGE,
            image_processor=kind,
            layout=kind,
            encoder="views",
            config=config,
            tensors="deepseek_ocr",
            prefixes=DEEPSEEK_OCR,
        )
        for architecture, kind, config in (
            ("DeepseekOCRForCausalLM", "deepseek_ocr", as_deepseek_ocr),
            *((name, "unlimited_ocr", as_unlimited_ocr) for name in WITH_OUTPUT_WINDOW),
            ("DeepseekOCR2ForCausalLM", "deepseek_ocr_2", as_deepseek_ocr_2),
            ("DeepseekOcr2ForConditionalGeneration", "deepseek_ocr_2", as_deepseek_ocr_2),
        )
    ),
)
