"""Prompts whose tokens attend to each other in both directions, if they have images (PaliGemma).

An embedding in the cache then depends on the whole prompt, so that the whole prompt is one media
item: its pages are found again only for the same prompt, and it is computed in one step. Loads no
torch.
"""

from collections.abc import Sequence

import numpy as np

from qserve.multimodal.media import Feature, MediaItem, digest_of


def framed_prompt(
    ids: Sequence[int], placeholder: int, bos: int, newline: Sequence[int]
) -> list[int]:
    """Return a prompt with the first token after its last image, and a newline at its end.

    `placeholder`: token of an image. `bos`: first token of a text, which tokenizers write in front
    of the images instead.
    """
    found = list(ids)
    if found[:1] == [bos]:
        del found[0]
    after = len(found) - found[::-1].index(placeholder)
    if found[after : after + 1] != [bos]:
        found.insert(after, bos)
    if found[-len(newline) :] != list(newline):
        found += newline
    return found


def as_one_item(ids: Sequence[int], items: Sequence[MediaItem]) -> MediaItem:
    """Return one item for a whole prompt. Its features are those of all items, stacked."""
    is_embed = np.zeros(len(ids), np.uint8)
    for item in items:
        is_embed[item.embed_positions()] = 1
    return MediaItem(
        kind=items[0].kind,
        # the token ids contain the positions of the images
        digest=digest_of(np.asarray(ids, np.int64).tobytes(), *(item.digest for item in items)),
        offset=0,
        length=len(ids),
        is_embed=is_embed.tobytes(),
        is_mutual=True,
        features=tuple(
            Feature.of(same[0].name, np.stack([each.array() for each in same]))
            for same in zip(*(item.features for item in items), strict=True)
        ),
    )
