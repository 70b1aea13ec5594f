"""Keys of full KV pages: a chain of SHA-256 over all tokens so far. Knows no pages.

A page's key is the digest of the key before it and the page's token ids, so equal keys mean equal
tokens from the start on. The chain begins with what else the keys and values depend on, and with
the salt that keeps clients apart: who cannot name the salt cannot find its pages, nor measure by
the time of an answer whether they are there.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256

TOKEN = "i"  # array's code for int32: all token ids fit


def root_key(
    *, salt: str = "", adapter: str = "", generation: int | str = 0, model: str = ""
) -> bytes:
    """What the chain begins with. `generation` changes when the weights, or an adapter's, do.

    `model`: what tells engines apart that exchange pages (kv_transfer/model_digest.py).
    """
    parts = (salt.encode(), adapter.encode(), str(generation).encode(), model.encode())
    # With their lengths: no two lists of parts make the same text.
    return sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def extend_keys(
    keys: list[bytes], token_ids: Sequence[int], *, page_size: int, last: bytes
) -> None:
    """Append the keys of the full pages of `token_ids` beyond those that `keys` has.

    `last`: the key before, which is the root where there is none yet.
    """
    start = len(keys) * page_size
    num_pages = len(token_ids) // page_size
    data = memoryview(array(TOKEN, token_ids[start : num_pages * page_size])).cast("B")
    width = page_size * array(TOKEN).itemsize
    key = last
    for offset in range(0, len(data), width):
        digest = sha256(key)
        digest.update(data[offset : offset + width])
        key = digest.digest()
        keys.append(key)
