"""MediaProcessor: turns a prompt, images and videos into token ids and media items.

transformers' image processor of the model's folder scales and cuts images, with Pillow.
video_processor.py does it for videos. The encoder converts the pixels to floats, so that they are
sent to the engine as bytes.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.architecture.family import architecture_of
from formats.checkpoint import CONFIG, read_json
from formats.errors import CheckpointError, InputError, one_line
from qserve.multimodal.decode import as_rgb
from qserve.multimodal.families import VISION_FAMILIES, VisionConfig, token_of
from qserve.multimodal.family import VisionFamily
from qserve.multimodal.image_processors.own_processor import OwnImageProcessor
from qserve.multimodal.image_processors.stated_options import COPY_OPTIONS
from qserve.multimodal.layouts.layout import Piece, Run
from qserve.multimodal.layouts.mutual_prompt import as_one_item, framed_prompt
from qserve.multimodal.layouts.table import VIDEO_LAYOUTS, layout_of
from qserve.multimodal.media import MediaItem, digest_of
from qserve.multimodal.video import Video
from qserve.multimodal.video_processor import VideoLimits, VideoProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

INSTALL = "install the extra: pip install 'qserve-kit[vision]'"
OPTIONS = "preprocessor_config.json"
MAX_NEWLINES = 31  # newlines of one token, at most, in Gemma's vocabulary
# exceptions of image processors for sizes and options that they do not support
REFUSALS = ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError
Encode = Callable[[str, bool], list[int]]  # text, True: add special tokens -> token ids


class MediaProcessor:
    """Processes the images and videos of prompts for one vision-language model."""

    def __init__(
        self,
        folder: str | Path,
        encode: Encode,
        video_limits: VideoLimits = VideoLimits(),  # noqa: B008  # immutable
    ) -> None:
        """Load the processors of a model's folder. Raises InputError.

        `encode`: the model's tokenizer.
        """
        self.folder = str(folder)
        config = VisionConfig.of(read_json(Path(folder) / CONFIG))
        if config is None:
            raise InputError(
                self.folder,
                "takes text only: it has no known vision tower",
                "use a vision-language model, or send no images",
            )
        config = config.with_tokens(encode)
        self.config, self._encode = config, encode
        self._layout = layout_of(config)
        self._image_processor = load_image_processor(folder)
        self._options = _options(self._image_processor)
        numbers_images = getattr(self._image_processor, "use_image_id", True)
        self._number_text = self._layout.number_text if numbers_images else ""
        kind, self._video_limits = config.family.video, video_limits
        self._video_processor = VideoProcessor(folder, kind) if kind else None
        # token -> number of newlines in it, for models that join them with those of an image
        self._newlines: dict[int, int] = {}
        if config.family.joins_newlines:
            self._newlines = _newline_tokens(encode)
        self._placeholder_id = config.placeholder_of(encode)
        self._token_ids: dict[str, int] = {}  # text of a token without an embedding -> its id

    def prepare(
        self,
        prompt: str | Sequence[int],
        images: Sequence["Image"],
        digests: Sequence[str],
        videos: Sequence[Video] = (),
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Replace each placeholder by the tokens of its image or video.

        Return the token ids and the media items. Raises InputError.
        `digests`: SHA-256 of each image, as hex digits.
        """
        ids = self._encode(prompt, True) if isinstance(prompt, str) else list(prompt)
        config = self.config
        if videos and self._video_processor is None:
            raise InputError(
                "videos",
                f"are not taken by {config.family.architecture}",
                "give frames as images",
            )
        _check_placeholders(ids, self._placeholder_id, "images", len(images))
        if images and config.family.has_mutual_prompt:
            bos = config.text["bos_token_id"]
            ids = framed_prompt(ids, self._placeholder_id, bos, self._encode("\n", False))
        if config.video_token_id is not None:
            _check_placeholders(ids, config.video_token_id, "videos", len(videos))
        if len(digests) != len(images):
            raise InputError(
                "digests",
                f"expected {len(images)}, found {len(digests)}",
                "give one digest for each image",
            )
        found: list[int] = []
        items: list[MediaItem] = []
        # part of the digest of an image whose layout depends on the other images of its prompt
        several = "several" if self._layout.sees_others and len(images) > 1 else ""
        pairs, clips = enumerate(zip(images, digests, strict=True)), iter(videos)
        for token in ids:
            if token == self._placeholder_id:
                number, (image, digest) = next(pairs)
                self._append_text(self._number_text.format(number), found)
                self._expand_image(image, digest, several, found, items)
            elif token == config.video_token_id:
                self._expand_video(next(clips), found, items)
            elif self._newlines.get(token) and found and found[-1] in self._newlines and items:
                self._append_text("", found, self._newlines[token])
            else:
                found.append(token)
        if items and config.family.has_mutual_prompt:
            items = [as_one_item(found, items)]
        return found, tuple(items)

    def _expand_image(
        self,
        image: "Image",
        digest: str,
        several: str,
        token_ids: list[int],
        items: list[MediaItem],
    ) -> None:
        """Append an image's tokens and items.

        `several`: not empty if the prompt has several images and the layout depends on it.
        """
        found = self._processed(image, has_others=bool(several))
        pieces = self._layout.pieces(found, self.config.values)
        self._expand("image", pieces, (digest, self._options + several), token_ids, items)

    def _expand_video(self, video: Video, token_ids: list[int], items: list[MediaItem]) -> None:
        """Append a video's tokens and items."""
        assert self._video_processor is not None
        clip = self._video_processor.prepare(video, self._video_limits)
        pieces = VIDEO_LAYOUTS[self.config.family.video](clip, self.config.values)
        options = self._video_processor.text + repr(self._video_limits)
        self._expand("video", pieces, (video.digest, options), token_ids, items)

    def _expand(
        self,
        kind: str,
        pieces: Iterable[Piece],
        digested: tuple[str, ...],
        token_ids: list[int],
        items: list[MediaItem],
    ) -> None:
        """Append the tokens and items of some pieces.

        `digested`: digest of the content, and all options.
        """
        text, number = "", 0
        for piece in pieces:
            if isinstance(piece, str):
                text += piece
                continue
            shared = self._layout.shared_token
            if shared and text == shared and token_ids[-1:] == [token_of(shared, self._encode)]:
                text = ""
            self._append_text(text, token_ids)
            text = ""
            if isinstance(piece, int):
                token_ids.append(piece)
                continue
            ids, is_embed = self._tokens_of(piece, self.config.fill_id(kind))
            items.append(
                MediaItem(
                    kind=kind,
                    digest=digest_of(*digested, str(number)),
                    offset=len(token_ids),
                    length=piece.length,
                    is_embed=is_embed,
                    is_mutual=self.config.is_mutual,
                    grid=piece.grid,
                    num_outer=piece.num_outer,
                    frame_step=piece.frame_step,
                    features=piece.features,
                )
            )
            token_ids += ids
            number += 1
        self._append_text(text, token_ids)

    def _append_text(self, text: str, token_ids: list[int], num_newlines: int = 0) -> None:
        """Append the tokens of a text after `num_newlines` newlines.

        Newlines at the end of `token_ids` are joined with those at the start of the text.
        """
        text = "\n" * num_newlines + text
        if not text:
            return
        if text.startswith("\n"):
            while token_ids and token_ids[-1] in self._newlines:
                text = "\n" * self._newlines[token_ids.pop()] + text
        token_ids += self._encode(text, False)

    def _tokens_of(self, run: Run, fill_id: int) -> tuple[list[int], bytes]:
        """Return the tokens of an item, and the mask of those with an embedding."""
        ids, is_embed = [fill_id] * run.length, bytearray(b"\1" * run.length)
        for place, text in run.other_tokens.items():
            if text not in self._token_ids:
                self._token_ids[text] = token_of(text, self._encode)
            ids[place], is_embed[place] = self._token_ids[text], 0
        return ids, bytes(is_embed) if run.other_tokens else b""

    def _processed(self, image: "Image", *, has_others: bool) -> Any:
        """Run transformers' image processor on an image. Raises InputError.

        `has_others`: add a small image, so that the processor does not treat the image as the only
        one.
        """
        options, (width, height) = self._layout.options(self.config.values), image.size
        if not width or not height:
            raise InputError("image", f"of {width} x {height} has no pixels", "send another image")
        try:
            images = [as_rgb(image)]
            if isinstance(self._image_processor, OwnImageProcessor):
                return self._image_processor.cut(images[0])
            if has_others:
                images.append(images[0].resize((1, 1)))
            return self._image_processor(
                images=self._layout.given(images),
                do_rescale=False,
                do_normalize=False,
                input_data_format="channels_last",
                **options,
            )
        except REFUSALS as error:
            raise InputError(
                "image",
                f"of {width} x {height} pixels cannot be processed: {one_line(error)}",
                "send an image of another size",
            ) from error


def _check_placeholders(ids: list[int], token: int, name: str, count: int) -> None:
    """Raise InputError unless a prompt has a placeholder for each image or video."""
    found = ids.count(token)
    if found != count:
        raise InputError(
            "prompt",
            f"has {found} placeholders for {count} {name}",
            f"write token {token} once for each of the {name}, or use a chat template",
        )


def _newline_tokens(encode: Encode) -> dict[int, int]:
    """Return a table: token that consists of newlines -> number of its newlines."""
    found = {}
    for count in range(1, MAX_NEWLINES + 1):
        ids = encode("\n" * count, False)
        if len(ids) == 1:
            found[ids[0]] = count
    return found


def load_image_processor(folder: str | Path) -> Any:
    """Load the image processor of a folder. Raises InputError.

    This is transformers' processor with Pillow, or OwnImageProcessor where transformers needs
    torchvision.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise InputError("images", f"need Pillow: {one_line(error)}", INSTALL) from error
    family = VISION_FAMILIES.get(architecture_of(read_json(Path(folder) / CONFIG)) or "")
    if family is not None and family.image_processor:
        return OwnImageProcessor(folder, family.image_processor)
    from transformers import AutoImageProcessor

    if family is not None:
        _check_options(Path(folder), family)
    try:
        if family is not None and family.processor_class:
            return _stated_class(Path(folder), family)
        try:
            return AutoImageProcessor.from_pretrained(
                str(folder), backend="pil", local_files_only=True, trust_remote_code=False
            )
        except ImportError:
            # Older versions choose a class with torchvision for some types of models.
            found = _class_with_pillow(Path(folder))
            if found is None:
                raise
            return found.from_pretrained(str(folder), local_files_only=True)
    # For a broken file the parser may raise an exception of any kind.
    except Exception as error:
        raise CheckpointError(
            str(folder),
            f"has no image processor that transformers can load: {one_line(error)}",
            COPY_OPTIONS,
        ) from error


def _check_options(folder: Path, family: VisionFamily) -> None:
    """Raise CheckpointError for an option with an unsupported value."""
    if not family.fixed_options or not (folder / OPTIONS).is_file():
        return
    stated = read_json(folder / OPTIONS)
    for key, value in family.fixed_options.items():
        if stated.get(key, value) != value:
            raise CheckpointError(
                f"{folder / OPTIONS} {key}",
                f"expected {value!r}, found {stated[key]!r:.80}, which is not supported",
                f"set it to {value!r}",
            )


def _stated_class(folder: Path, family: VisionFamily) -> Any:
    """Load transformers' image processor of a class, from options of another one."""
    import transformers

    stated = read_json(folder / OPTIONS) if (folder / OPTIONS).is_file() else {}
    changed: dict[str, Any] = {}
    if not isinstance(stated.get("size"), dict):  # MiniMax-M3: a list that its code does not use
        keys, defaults = ("min_pixels", "max_pixels"), family.default_pixels
        pixels = [stated.get(key, usual) for key, usual in zip(keys, defaults, strict=False)]
        if not defaults and set(keys) <= stated.keys():
            pixels = [stated[key] for key in keys]
        if pixels:
            changed["size"] = dict(zip(("shortest_edge", "longest_edge"), pixels, strict=True))
    return getattr(transformers, family.processor_class).from_pretrained(
        str(folder), local_files_only=True, **changed
    )


def _class_with_pillow(folder: Path) -> Any:
    """Return transformers' class with Pillow that a folder's options name, or None."""
    import transformers

    stated = read_json(folder / OPTIONS) if (folder / OPTIONS).is_file() else {}
    name = stated.get("image_processor_type")
    if not isinstance(name, str):
        return None
    return getattr(transformers, f"{name.removesuffix('Fast')}Pil", None)


def image_digest(image: "Image") -> str:
    """Return the SHA-256 of an image's pixels as hex digits."""
    return digest_of("pixels", repr(image.size), image.convert("RGBA").tobytes())


def _options(processor: Any) -> str:
    """Return all options of an image processor as JSON text."""
    return json.dumps(processor.to_dict(), sort_keys=True, default=str)
