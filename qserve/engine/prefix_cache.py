"""PrefixCache: a request's tokens as pages that are there already. Knows requests and page numbers.

A full page can be found from the moment that the step that fills it is planned: steps run in their
order, and within one each layer writes all its keys before it reads any. Of a token that was
sampled the host learns later; its page waits for that.
"""

import secrets
from collections.abc import Collection
from typing import NamedTuple

from qserve.engine.kv_pages import NULL_PAGE, PagePool
from qserve.engine.prefix_keys import extend_keys, root_key
from qserve.engine.request import Request
from qserve.engine.state_snapshots import StateSnapshots


class Export(NamedTuple):
    """Full pages of a request that hold what they should."""

    request_id: str
    keys: list[bytes]
    pages: list[int]


class PrefixCache:
    """Which pages a request can take over, and which of its own others can."""

    def __init__(
        self,
        pool: PagePool,
        *,
        enabled: bool = True,
        looks_ahead: bool = False,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        """`looks_ahead`: what a page holds also follows from the token behind it.

        `snapshots`: of models with states, without which pages are of no use.
        """
        self.pool = pool
        self.snapshots = snapshots
        self.enabled = enabled
        self._num_unsure = int(looks_ahead)  # last pages of what is found: the next may be another
        # of an engine that exchanges pages with others; page_transfers.py fills them
        self.model = ""  # part of all keys
        self.exports: list[Export] | None = None  # what others may have, since the last step
        # tokens that were looked for, and those that were there, of requests when first admitted
        self._num_queries = self._num_hits = 0
        self._generation: int | str = 0
        self._last: tuple[Request, bytes] | None = None  # whose keys were made last, and its root

    def add(self, request: Request) -> None:
        """Make the keys of a new request: 0.5 us for each page of 16 tokens."""
        if not self.enabled:
            return
        last, last_root = self._last or (None, b"")
        root = self._root_key(request)  # another where its adapter was read again
        if (
            last_root == root
            and last.num_prompt_tokens == request.num_prompt_tokens
            and last.token_ids[: last.num_prompt_tokens] == request.token_ids
        ):  # another output of the same prompt
            num_pages = request.num_prompt_tokens // self.pool.page_size
            request.page_keys = last.page_keys[:num_pages]
        self._extend_keys(request)
        self._last = request, root

    def num_cached(self, request: Request) -> int:
        """Tokens of a waiting request that need not be computed now."""
        keys = self._wanted(request)
        return self._num_usable(keys, self.pool.match(keys)) * self.pool.page_size

    def num_pages_needed(self, request: Request, num_free: int) -> int:
        """Free pages that a waiting request takes: of those that it finds, only what nobody holds.

        Looks for them only where `num_free` may not be enough.
        """
        needed = self.pool.pages_for(request.num_tokens)
        if needed <= num_free:
            return needed
        keys = self._wanted(request)
        pages = self.pool.match(keys)
        return needed - self.pool.num_held(pages[: self._num_usable(keys, pages)])

    def will_share(self, request: Request, other: Request) -> bool:
        """Whether the next page that `other` computes is one that `request` could then take.

        With states, the next one behind which a copy of its state is kept.
        """
        index = other.num_published
        if self.snapshots is not None:
            # also in the step that computes up to there: the copy is made after it
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
        """Give a request its pages, for all of its tokens; those that hold them already first."""
        pool, table, keys = self.pool, request.block_table, self._wanted(request)
        there = pool.match(keys)
        num_found = self._num_usable(keys, there)
        pages = there[:num_found]
        pool.share_(table, pages)
        if num_found > len(pages):
            pool.load_(table, keys[len(pages) : num_found])
        pool.grow_(table, request.num_tokens)
        request.num_published = num_found
        request.num_computed = num_found * pool.page_size
        if self.snapshots is not None:
            self.snapshots.begin_(request, len(there))
        if self.enabled and not request.num_preemptions:
            request.num_cached = request.num_computed
            self._num_queries += request.num_tokens
            self._num_hits += request.num_computed

    def publish(self, request: Request) -> None:
        """Let others find the pages of a request that are full and whose tokens are known."""
        if not self.enabled:
            return
        num_known = min(request.num_computed, len(request.token_ids))
        num_full = num_known // self.pool.page_size
        if request.num_published >= num_full:
            return
        if len(request.page_keys) < num_full:
            self._extend_keys(request)
        for index in range(request.num_published, num_full):
            page = request.block_table[index]
            if page != NULL_PAGE:  # it has left the window already
                self.pool.publish(page, request.page_keys[index])
        request.num_published = num_full

    def export(self, request: Request) -> None:
        """Note a running request's pages for other engines, now that a token came of them."""
        request.is_exported = True
        self.publish(request)
        table = request.block_table
        num_full = min(request.num_published, len(request.page_keys), len(table))
        there = [index for index in range(num_full) if table[index] != NULL_PAGE]
        if there:
            keys = [request.page_keys[index] for index in there]
            self.exports.append(Export(request.request_id, keys, [table[i] for i in there]))

    def missing(self, request: Request) -> tuple[list[bytes], list[bytes]]:
        """Keys of the pages that a waiting request may take: those that are on the host, those
        after them that are nowhere here."""
        keys = self._wanted(request)
        on_device = len(self.pool.match(keys))
        found = on_device + self._num_on_host(keys, on_device)
        return keys[on_device:found], keys[found:]

    def take_counts(self) -> tuple[int, int]:
        """Tokens that were looked for, and those that were there, since the last call."""
        counts = self._num_queries, self._num_hits
        self._num_queries = self._num_hits = 0
        return counts

    def withdraw(self, request: Request) -> None:
        """Let nobody find what a running request computed: it is wrong.

        That holds for pages which it has given back, too, since they left its window.
        """
        table = request.block_table
        self.pool.withdraw(table)
        known = zip(table, request.page_keys, strict=False)
        self.pool.withdraw_keys([key for page, key in known if page == NULL_PAGE])
        if self.snapshots is not None:
            self.snapshots.withdraw(request)
        self.keep_private(request)

    def keep_private(self, request: Request) -> None:
        """Publish nothing more of a running request."""
        request.num_published = self.pool.num_pages

    def reset(self, requests: Collection[Request]) -> None:
        """Forget all keys, as the weights may be others from now on.

        `requests`: all that there are. Those that run have tokens from before in their pages, so
        what they compute is not for others; preempted ones begin anew.
        """
        self.pool.withdraw_all()
        if self.snapshots is not None:
            self.snapshots.drop_all()
        # No other engine comes to the same: its weights need not have changed as these have.
        self._generation = secrets.token_hex(16) if self.model else int(self._generation) + 1
        self._last = None
        for request in requests:
            request.page_keys = []
            if request.block_table:
                self.keep_private(request)
            else:
                self._extend_keys(request)

    def _wanted(self, request: Request) -> list[bytes]:
        """Keys of the pages that a waiting request may take: one token at least is computed."""
        if not (self.enabled and request.reads_cache):
            return []
        if len(request.page_keys) < len(request.token_ids) // self.pool.page_size:
            self._extend_keys(request)
        return request.page_keys[: self._most(request)]

    def _most(self, request: Request) -> int:
        return (request.num_tokens - 1) // self.pool.page_size

    def _root_key(self, request: Request) -> bytes:
        return root_key(
            salt=request.cache_salt,
            adapter="" if request.adapter is None else request.adapter.generation,
            generation=self._generation,
            model=self.model,
        )

    def _num_usable(self, keys: list[bytes], pages: list[int]) -> int:
        """How many of the pages with these keys need not be computed; `pages`: those found here."""
        if self.snapshots is not None:
            return self.snapshots.deepest(keys[: len(pages)])
        return max(0, len(pages) + self._num_on_host(keys, len(pages)) - self._num_unsure)

    def _num_on_host(self, keys: list[bytes], start: int) -> int:
        return 0 if self.pool.host is None else self.pool.host.match(keys[start:])

    def _extend_keys(self, request: Request) -> None:
        keys = request.page_keys
        last = keys[-1] if keys else self._root_key(request)
        extend_keys(keys, request.token_ids, page_size=self.pool.page_size, last=last)
