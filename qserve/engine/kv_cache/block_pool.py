"""BlockPool: allocates KV pages, counts their references and stores the keys of cached pages.

A page is referenced by the block tables that list it. A full page may have a key, which represents
all tokens from the sequence's start to the page's end (prefix_cache.py). Requests with the same
tokens find the page by its key until the page is evicted, even without any reference to it.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from qserve.engine.kv_cache.host_tier import HostTier, PageMoves

# Entry of a block table for a page that was freed because it has left the attention window.
NULL_PAGE = -1


class BlockPool:
    """Allocates page numbers 0..num_pages-1.

    Free pages without a key are used first, then the least recently used cached page. The last
    pages of a block table are evicted before its first pages: a prefix without its start is
    useless.
    """

    def __init__(self, num_pages: int, page_size: int, host: HostTier | None = None) -> None:
        self.num_pages = num_pages
        self.page_size = page_size  # tokens of one page
        self.host = host  # receives evicted pages
        self._num_references = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._pages: dict[bytes, int] = {}
        self._blank = deque(range(num_pages))  # free pages without a key
        # free pages with a key, in order of eviction
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._reserved: list[list[int]] = []  # tables of pages that are filled from outside
        # (source page, target page) of copies to make before the next step
        self._copies: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        """Number of unreferenced pages."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Number of unreferenced pages that can be found by a key."""
        return len(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        """Number of pages that hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def can_grow(self, block_table: list[int], num_tokens: int) -> bool:
        return self.pages_for(num_tokens) - len(block_table) <= self.num_free

    def grow_(self, block_table: list[int], num_tokens: int) -> None:
        """Add new pages to `block_table` until it holds `num_tokens` positions."""
        for _ in range(self.pages_for(num_tokens) - len(block_table)):
            page = self._blank.popleft() if self._blank else self._evict()
            self._num_references[page] = 1
            block_table.append(page)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest cached prefix of `keys`."""
        found, pages = [], self._pages
        for key in keys:
            page = pages.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def num_referenced(self, pages: Iterable[int]) -> int:
        """Number of these pages that are referenced. Sharing such a page uses no free page."""
        return sum(self._num_references[page] > 0 for page in pages)

    def num_shared(self, block_table: list[int]) -> int:
        """Number of a table's pages that other tables reference too; a release keeps these."""
        return sum(page != NULL_PAGE and self._num_references[page] > 1 for page in block_table)

    def num_unshared(self, block_table: list[int]) -> int:
        """Number of a table's pages that no other table references; a release frees these."""
        return sum(page != NULL_PAGE and self._num_references[page] == 1 for page in block_table)

    def share_(self, block_table: list[int], pages: Sequence[int]) -> None:
        """Append pages that `match` returned. Call before allocating, which may evict them."""
        for page in pages:
            if not self._num_references[page]:
                del self._cached[page]
            self._num_references[page] += 1
        block_table.extend(pages)

    def is_shared(self, page: int) -> bool:
        """Return whether more than one table lists a page."""
        return self._num_references[page] > 1

    def fork_(self, block_table: list[int], pages: Sequence[int]) -> None:
        """Make a table reference `pages` instead of its own. `pages` must be referenced already."""
        for page in pages:
            if page != NULL_PAGE:
                self._num_references[page] += 1
        self.release_(block_table)
        block_table.extend(pages)

    def own_(self, block_table: list[int], index: int) -> None:
        """Replace a shared page by a new page. Its contents are copied before the next step."""
        shared, new = block_table[index], []
        self.grow_(new, 1)
        self._copies.append((shared, new[0]))
        self._num_references[shared] -= 1
        block_table[index] = new[0]

    def load_(self, block_table: list[int], keys: Sequence[bytes]) -> None:
        """Append new pages. Their contents are loaded from the host tier before the next step."""
        self.host.keep(keys)  # allocating may store evicted pages in the host tier
        start = len(block_table)
        self.grow_(block_table, (start + len(keys)) * self.page_size)
        for page, key in zip(block_table[start:], keys, strict=True):
            self.host.load(key, page)
            self.insert(page, key)

    def reserve(self, count: int) -> list[int] | None:
        """Allocate pages that are filled from outside. Returns None if too few are free.

        Evicted contents of these pages are dropped: no step copies them to the host tier before the
        pages are overwritten.
        """
        if count > self.num_free:
            return None
        table: list[int] = []
        for _ in range(count):
            page = self._blank.popleft() if self._blank else self._evict(stores=False)
            self._num_references[page] = 1
            table.append(page)
        self._reserved.append(table)
        return table

    def settle_(self, table: list[int], keys: Sequence[bytes]) -> None:
        """Free reserved pages. The first len(keys) pages are filled: insert them by their keys."""
        self._reserved = [each for each in self._reserved if each is not table]
        for page, key in zip(table, keys, strict=False):
            self.insert(page, key)
        self.release_(table)

    def insert(self, page: int, key: bytes) -> None:
        """Insert a full, referenced page into the cache.

        If the cache already has a page with this key, nothing changes; tables are never rewritten.
        """
        if self._keys[page] is None and self._pages.setdefault(key, page) == page:
            self._keys[page] = key

    def invalidate(self, pages: Iterable[int]) -> None:
        """Remove pages from the cache because their contents are invalid.

        NULL_PAGE entries, which tables hold for freed pages, are skipped.
        """
        for key in self._remove_keys(pages):
            if self.host is not None:
                self.host.drop(key)

    def invalidate_keys(self, keys: Iterable[bytes]) -> None:
        """Remove these keys from the cache, on the device and in the host tier."""
        for key in keys:
            if key in self._pages:
                self.invalidate([self._pages[key]])
            elif self.host is not None:
                self.host.drop(key)

    def invalidate_all(self) -> None:
        """Remove every key. Referenced pages stay allocated."""
        self.invalidate(list(self._pages.values()))
        if self.host is not None:
            self.host.drop_all()

    def release_(self, block_table: list[int]) -> None:
        """Drop the reference to every page of `block_table` and empty it."""
        for page in reversed(block_table):
            if page == NULL_PAGE:
                continue
            self._num_references[page] -= 1
            if self._num_references[page]:
                continue
            if self._keys[page] is None:
                self._blank.append(page)
            else:
                self._cached[page] = None
        block_table.clear()

    def release_before_(self, block_table: list[int], first_visible: int) -> None:
        """Release the pages whose positions all precede `first_visible`."""
        index = first_visible // self.page_size - 1
        left = []
        while index >= 0 and block_table[index] != NULL_PAGE:
            left.append(block_table[index])
            block_table[index] = NULL_PAGE
            index -= 1
        self.release_(left[::-1])

    def take_moves(self) -> PageMoves | None:
        """Return the page copies to make before the next step, or None."""
        moves = None if self.host is None else self.host.take_moves()
        if self._copies:
            copies = np.array(self._copies, np.int64)
            self._copies = []
            moves = replace(moves or PageMoves(), copied_from=copies[:, 0], copied_to=copies[:, 1])
        return moves

    def invalidate_moves(self, moves: PageMoves) -> set[int]:
        """Invalidate the targets of page copies that may not have been made.

        Returns the pages with undefined contents; their requests must end. Host slots from which
        pages were loaded keep their keys.
        """
        if self.host is not None:
            self.host.forget(moves.stored_slots.tolist())
        undefined = {*moves.loaded_pages.tolist(), *moves.copied_to.tolist()}
        self._remove_keys(undefined)
        return undefined

    def check_integrity(self, block_tables: list[list[int]]) -> None:
        """Assert that references, keys and free pages match `block_tables`."""
        tables = [
            [page for page in table if page != NULL_PAGE]
            for table in (*block_tables, *self._reserved)
        ]
        held = Counter(page for table in tables for page in table)
        if any(len(set(table)) < len(table) for table in tables):
            raise AssertionError(f"a table lists a KV page twice: {block_tables}")
        num_references = [0] * self.num_pages
        for page, count in held.items():
            num_references[page] = count
        if num_references != self._num_references:
            raise AssertionError(f"KV pages: held {held}, counted {self._num_references}")
        free = [*self._blank, *self._cached]
        if sorted([*held, *free]) != list(range(self.num_pages)):
            raise AssertionError(f"KV pages lost or shared: held {held}, free {free}")
        keyed = {page: key for page, key in enumerate(self._keys) if key is not None}
        if {page: key for key, page in self._pages.items()} != keyed:
            raise AssertionError("keys and pages are inconsistent")
        if not keyed.keys() >= self._cached.keys() or keyed.keys() & set(self._blank):
            raise AssertionError("a free page is in the wrong list")

    def _remove_keys(self, pages: Iterable[int]) -> list[bytes]:
        """Remove the keys of pages. Returns the removed keys."""
        keys = []
        for page in pages:
            if page == NULL_PAGE:
                continue
            key, self._keys[page] = self._keys[page], None
            if key is None:
                continue
            del self._pages[key]
            keys.append(key)
            if page in self._cached:
                del self._cached[page]
                self._blank.append(page)
        return keys

    def _evict(self, *, stores: bool = True) -> int:
        """Evict the least recently used cached page. `stores`: store it in the host tier."""
        page, _ = self._cached.popitem(last=False)
        key, self._keys[page] = self._keys[page], None
        del self._pages[key]
        if stores and self.host is not None:
            self.host.store(key, page)
        return page
