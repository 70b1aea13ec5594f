"""PrefixCache: finds full KV pages by their tokens.

Page keys form a chain of SHA-256 digests: the key of a page is the digest of the previous page's
key, the page's token ids and the media items that overlap the page. Equal keys therefore mean equal
tokens and media from the start. The root of the chain covers everything else that keys and values
depend on (model, adapter, generation), and the salt that isolates clients: without the salt, a
client can neither find pages nor probe for them by response times.

A full page can be found as soon as the step that fills it is planned: steps run in order, and
within a step each layer writes all its keys before it reads any. A page that ends in a sampled
token can be found once the host knows that token.
"""

import secrets
from array import array
from collections.abc import Collection, Sequence
from hashlib import sha256
from typing import NamedTuple

from qserve.engine.kv_cache.block_pool import NULL_PAGE, BlockPool
from qserve.engine.kv_cache.state_snapshots import StateSnapshots
from qserve.engine.request import Request
from qserve.multimodal.media import MediaItem

TOKEN = "i"  # array's code for int32, which holds every token id


def root_key(
    *, salt: str = "", adapter: str = "", generation: int | str = 0, model: str = ""
) -> bytes:
    """Return the root of a key chain.

    `generation` changes with the weights, `adapter` with the adapter's weights. `model` separates
    the models of engines that exchange pages (kv_transfer/model_digest.py).
    """
    parts = (salt.encode(), adapter.encode(), str(generation).encode(), model.encode())
    # With length prefixes, different lists of parts never give the same bytes.
    return sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def extend_keys(
    keys: list[bytes],
    token_ids: Sequence[int],
    *,
    page_size: int,
    last: bytes,
    media: Sequence[MediaItem] = (),
) -> None:
    """Append the keys of those full pages of `token_ids` that `keys` does not have yet.

    `last`: the last entry of `keys`, or the root if `keys` is empty. `media`: items in order of
    position.
    """
    start = len(keys) * page_size
    num_pages = len(token_ids) // page_size
    data = memoryview(array(TOKEN, token_ids[start : num_pages * page_size])).cast("B")
    width = page_size * array(TOKEN).itemsize
    key = last
    for offset in range(0, len(data), width):
        digest = sha256(key)
        digest.update(data[offset : offset + width])
        if media:
            first = start + offset // array(TOKEN).itemsize
            for item in media:
                if item.offset < first + page_size and item.end > first:
                    digest.update(item.key(first))
        key = digest.digest()
        keys.append(key)


class Export(NamedTuple):
    """Full pages of a request with valid contents."""

    request_id: str
    keys: list[bytes]
    pages: list[int]
    states: list[tuple[bytes, int]]  # (key, slot) of state snapshots


class Missing(NamedTuple):
    """Keys of a prompt's pages that the device lacks, in order, and keys of state snapshots."""

    on_host: list[bytes]  # the host tier has these pages
    elsewhere: list[bytes]  # the pages after them, which this engine lacks
    states: list[bytes]  # all keys after the deepest usable snapshot; empty without states
    num_with_pages: int  # number of keys in `states` whose pages this engine has


class PrefixCache:
    """Decides which cached pages a request reuses, and which of its pages enter the cache."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        enabled: bool = True,
        looks_ahead: bool = False,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        """`looks_ahead`: True if the contents of a page also depend on the token after it.

        `snapshots`: state snapshots; a model with states can reuse pages only up to a snapshot.
        """
        self.pool = pool
        self.snapshots = snapshots
        self.enabled = enabled
        # number of last pages of a match that are not reused, since the token after may differ
        self._num_unusable = int(looks_ahead)
        # for an engine that exchanges pages with others; set by remote_kv.py
        self.model = ""  # part of all keys
        self.exports: list[Export] | None = None  # pages for other engines, since the last step
        # tokens looked up and tokens found, counted at the first admission of each request
        self._num_queries = self._num_hits = 0
        self._generation: int | str = 0
        # the request whose keys were computed last, and the root of its keys
        self._last: tuple[Request, bytes] | None = None

    def add(self, request: Request) -> None:
        """Compute the keys of a new request. This takes 0.5 us per page of 16 tokens."""
        if not self.enabled:
            return
        last, last_root = self._last or (None, b"")
        root = self._root_key(request)  # differs if its adapter was reloaded
        if (
            last_root == root
            and last.num_prompt_tokens == request.num_prompt_tokens
            and last.token_ids[: last.num_prompt_tokens] == request.token_ids
            and last.media == request.media
        ):  # another output of the same prompt
            num_pages = request.num_prompt_tokens // self.pool.page_size
            request.page_keys = last.page_keys[:num_pages]
        self._extend_keys(request)
        self._last = request, root

    def num_cached(self, request: Request) -> int:
        """Number of cached tokens of a waiting request."""
        keys = self._usable_keys(request)
        return self._num_usable(keys, self.pool.match(keys)) * self.pool.page_size

    def num_pages_needed(self, request: Request, num_free: int) -> int:
        """Number of free pages that a waiting request needs.

        Reusing a cached page that a running request references needs no free page. The cache is
        searched only if `num_free` may be too small.
        """
        needed = self.pool.pages_for(request.num_slots(request.num_tokens))
        if needed <= num_free:
            return needed
        keys = self._usable_keys(request)
        pages = self.pool.match(keys)
        return needed - self.pool.num_referenced(pages[: self._num_usable(keys, pages)])

    def will_share(self, request: Request, other: Request) -> bool:
        """Return whether `request` can reuse the next page that `other` computes.

        For a model with states, this is the next page at whose end a snapshot of `other` is made.
        """
        index = other.num_inserted
        if self.snapshots is not None:
            # An end that is already planned counts: its snapshot is made after that step.
            stops = [end for end in other.snapshots_at if end >= other.num_computed]
            index = (stops or [0])[0] // self.pool.page_size - 1
            if not 0 <= index < len(other.page_keys):
                return False
            if self.snapshots.has(other.page_keys[index]):
                return False
        keys = request.page_keys
        return (
            self.enabled
            and request.reads_cache
            and index < min(len(keys), len(other.page_keys), self._most(request))
            and keys[index] == other.page_keys[index]
        )

    def take_(self, request: Request) -> None:
        """Allocate pages for all tokens of a request. Cached pages are reused."""
        pool, table, keys = self.pool, request.block_table, self._usable_keys(request)
        there = pool.match(keys)
        num_cached = len(there) + self._num_on_host(keys, len(there))
        num_found = self._num_usable(keys, there)
        pages = there[:num_found]
        pool.share_(table, pages)
        if num_found > len(pages):
            pool.load_(table, keys[len(pages) : num_found])
        pool.grow_(table, request.num_slots(request.num_tokens))
        request.num_inserted = num_found
        request.num_computed = num_found * pool.page_size
        if self.snapshots is not None:
            self.snapshots.begin_(request, num_cached)
        if self.enabled and not request.facts.num_preemptions:
            request.facts = request.facts._replace(num_cached=request.num_computed)
            self._num_queries += request.num_tokens
            self._num_hits += request.num_computed

    def insert(self, request: Request) -> None:
        """Insert those pages of a request that are full and whose tokens are known."""
        if not self.enabled:
            return
        num_known = min(request.num_computed, len(request.token_ids))
        if request.output_window:  # later tokens replace the keys of the output
            num_known = min(num_known, request.num_prompt_tokens)
        num_full = num_known // self.pool.page_size
        if request.num_inserted >= num_full:
            return
        if len(request.page_keys) < num_full:
            self._extend_keys(request)
        for index in range(request.num_inserted, num_full):
            page = request.block_table[index]
            if page != NULL_PAGE:  # NULL_PAGE: the page has already left the window
                self.pool.insert(page, request.page_keys[index])
        request.num_inserted = num_full

    def export(self, request: Request) -> None:
        """Record a running request's pages for other engines, at its first token and at its end."""
        request.is_exported = True
        self.insert(request)
        table = request.block_table
        num_full = min(request.num_inserted, len(request.page_keys), len(table))
        there = [index for index in range(num_full) if table[index] != NULL_PAGE]
        if there:
            keys = [request.page_keys[index] for index in there]
            states = [] if self.snapshots is None else self.snapshots.made(keys)
            pages = [table[index] for index in there]
            self.exports.append(Export(request.request_id, keys, pages, states))

    def missing(self, request: Request) -> Missing:
        """Return keys of pages and snapshots that a waiting request needs and the device lacks."""
        keys = self._usable_keys(request)
        on_device = len(self.pool.match(keys))
        found = on_device + self._num_on_host(keys, on_device)
        if self.snapshots is None:
            return Missing(keys[on_device:found], keys[found:], [], 0)
        start = self.snapshots.deepest(keys[:found])
        return Missing(keys[on_device:found], keys[found:], keys[start:], found - start)

    def take_counts(self) -> tuple[int, int]:
        """Return the number of tokens looked up and of tokens found since the last call."""
        counts = self._num_queries, self._num_hits
        self._num_queries = self._num_hits = 0
        return counts

    def invalidate(self, request: Request) -> None:
        """Remove a running request's pages from the cache because their contents are invalid.

        Pages that the request released because they left the window are removed too.
        """
        table = request.block_table
        self.pool.invalidate(table)
        known = zip(table, request.page_keys, strict=False)
        self.pool.invalidate_keys([key for page, key in known if page == NULL_PAGE])
        if self.snapshots is not None:
            self.snapshots.invalidate(request)
        self.keep_private(request)

    def keep_private(self, request: Request) -> None:
        """Insert no further pages of a running request."""
        request.num_inserted = self.pool.num_pages

    def reset(self, requests: Collection[Request]) -> None:
        """Forget all keys, since the weights may have changed.

        `requests`: all unfinished requests. Pages of running requests were computed with the old
        weights, so no page of them enters the cache any more; requests without pages get new keys.
        """
        self.pool.invalidate_all()
        if self.snapshots is not None:
            self.snapshots.drop_all()
        # Random if pages are exchanged: another engine may not have the new weights.
        self._generation = secrets.token_hex(16) if self.model else int(self._generation) + 1
        self._last = None
        for request in requests:
            request.page_keys = []
            if request.block_table:
                self.keep_private(request)
            else:
                self._extend_keys(request)

    def _usable_keys(self, request: Request) -> list[bytes]:
        """Return the keys of pages that a waiting request may reuse.

        At least one token is left to compute.
        """
        if not (self.enabled and request.reads_cache):
            return []
        if len(request.page_keys) < len(request.token_ids) // self.pool.page_size:
            self._extend_keys(request)
        return request.page_keys[: self._most(request)]

    def _most(self, request: Request) -> int:
        most = request.num_tokens - 1
        if request.output_window:
            # In a prompt the same tokens attend to all before them, so their keys differ.
            most = min(most, request.num_prompt_tokens)
        return most // self.pool.page_size

    def _root_key(self, request: Request) -> bytes:
        return root_key(
            salt=request.cache_salt,
            adapter="" if request.adapter is None else request.adapter.generation,
            generation=self._generation,
            model=self.model,
        )

    def _num_usable(self, keys: list[bytes], pages: list[int]) -> int:
        """Number of leading `keys` whose pages can be reused. `pages`: those on the device."""
        num_cached = len(pages) + self._num_on_host(keys, len(pages))
        if self.snapshots is not None:
            return self.snapshots.deepest(keys[:num_cached])
        return max(0, num_cached - self._num_unusable)

    def _num_on_host(self, keys: list[bytes], start: int) -> int:
        return 0 if self.pool.host is None else self.pool.host.match(keys[start:])

    def _extend_keys(self, request: Request) -> None:
        keys = request.page_keys
        last = keys[-1] if keys else self._root_key(request)
        extend_keys(
            keys,
            request.token_ids,
            page_size=self.pool.page_size,
            last=last,
            media=request.media,
        )
