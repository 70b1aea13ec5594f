"""The pool of KV pages: who holds which, and which can be found again. Knows no contents.

A page is held by the block tables that list it. A full page may have a key, which stands for all
tokens from the sequence's start to the page's end (prefix_keys.py): who has the same tokens finds
the page by it, also after its last holder is gone, until the page is needed for something else.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from qserve.engine.host_pages import HostPages, PageMoves

# In a block table: a page that was given back, since no query sees its positions any more.
NULL_PAGE = -1


class PagePool:
    """Hands out page numbers 0..num_pages-1.

    Free pages without a key go first. Then goes the one that nobody has used for longest, and of
    one table its end before its start: a prefix without its start is worth nothing.
    """

    def __init__(self, num_pages: int, page_size: int, host: HostPages | None = None) -> None:
        self.num_pages = num_pages
        self.page_size = page_size  # tokens of one page
        self.host = host  # where pages with keys go that are taken for something else
        self._num_holders = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._pages: dict[bytes, int] = {}
        self._blank = deque(range(num_pages))  # free, without a key
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, with one; the next to go first
        self._copies: list[tuple[int, int]] = []  # from a page to another, before the next step

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Those of the free pages that can be found by a key."""
        return len(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def can_grow(self, block_table: list[int], num_tokens: int) -> bool:
        return self.pages_for(num_tokens) - len(block_table) <= self.num_free

    def grow_(self, block_table: list[int], num_tokens: int) -> None:
        """Add new pages to `block_table` until it holds `num_tokens` positions."""
        for _ in range(self.pages_for(num_tokens) - len(block_table)):
            page = self._blank.popleft() if self._blank else self._evict()
            self._num_holders[page] = 1
            block_table.append(page)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest prefix of `keys` that is here."""
        found, pages = [], self._pages
        for key in keys:
            page = pages.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def num_held(self, pages: Iterable[int]) -> int:
        """How many of some pages have a holder: sharing them takes nothing from the free ones."""
        return sum(self._num_holders[page] > 0 for page in pages)

    def num_shared(self, block_table: list[int]) -> int:
        """How many pages of a table others hold too: giving it back does not free them."""
        return sum(page != NULL_PAGE and self._num_holders[page] > 1 for page in block_table)

    def num_alone(self, block_table: list[int]) -> int:
        """How many pages of a table nobody else holds: giving it back frees them."""
        return sum(page != NULL_PAGE and self._num_holders[page] == 1 for page in block_table)

    def share_(self, block_table: list[int], pages: Sequence[int]) -> None:
        """Add pages that `match` found. Before anything else is taken, or they may be evicted."""
        for page in pages:
            if not self._num_holders[page]:
                del self._cached[page]
            self._num_holders[page] += 1
        block_table.extend(pages)

    def is_shared(self, page: int) -> bool:
        """Whether more than one table lists a page."""
        return self._num_holders[page] > 1

    def fork_(self, block_table: list[int], pages: Sequence[int]) -> None:
        """Let a table list the pages of another, which is held, in place of its own."""
        for page in pages:
            if page != NULL_PAGE:
                self._num_holders[page] += 1
        self.release_(block_table)
        block_table.extend(pages)

    def own_(self, block_table: list[int], index: int) -> None:
        """Put a new page, filled from it before the next step, in place of one that is shared."""
        shared, new = block_table[index], []
        self.grow_(new, 1)
        self._copies.append((shared, new[0]))
        self._num_holders[shared] -= 1
        block_table[index] = new[0]

    def load_(self, block_table: list[int], keys: Sequence[bytes]) -> None:
        """Add new pages that are filled from the host, before the next step, by their keys."""
        self.host.keep(keys)  # taking pages stores others there
        start = len(block_table)
        self.grow_(block_table, (start + len(keys)) * self.page_size)
        for page, key in zip(block_table[start:], keys, strict=True):
            self.host.load(key, page)
            self.publish(page, key)

    def publish(self, page: int, key: bytes) -> None:
        """Let others find a full page that is held.

        Where another page has the same contents that one stays: tables are never rewritten.
        """
        if self._keys[page] is None and self._pages.setdefault(key, page) == page:
            self._keys[page] = key

    def withdraw(self, pages: Iterable[int]) -> None:
        """Let nobody find these pages any more: what they hold is wrong.

        In place of those that were given back tables list NULL_PAGE, which is passed over.
        """
        for key in self._unkey(pages):
            if self.host is not None:
                self.host.drop(key)

    def withdraw_keys(self, keys: Iterable[bytes]) -> None:
        """Let nobody find what these keys stand for, on the device or the host."""
        for key in keys:
            if key in self._pages:
                self.withdraw([self._pages[key]])
            elif self.host is not None:
                self.host.drop(key)

    def withdraw_all(self) -> None:
        """Forget every key. Pages that are held stay so."""
        self.withdraw(list(self._pages.values()))
        if self.host is not None:
            self.host.drop_all()

    def release_(self, block_table: list[int]) -> None:
        """Give back every page of `block_table` and empty it."""
        for page in reversed(block_table):
            if page == NULL_PAGE:
                continue
            self._num_holders[page] -= 1
            if self._num_holders[page]:
                continue
            if self._keys[page] is None:
                self._blank.append(page)
            else:
                self._cached[page] = None
        block_table.clear()

    def give_back_(self, block_table: list[int], first_visible: int) -> None:
        """Release the pages whose positions all stand before `first_visible`."""
        index = first_visible // self.page_size - 1
        left = []
        while index >= 0 and block_table[index] != NULL_PAGE:
            left.append(block_table[index])
            block_table[index] = NULL_PAGE
            index -= 1
        self.release_(left[::-1])

    def take_moves(self) -> PageMoves | None:
        """The pages to copy before the next step, if there are any."""
        moves = None if self.host is None else self.host.take_moves()
        if self._copies:
            copies = np.array(self._copies, np.int64)
            self._copies = []
            moves = replace(moves or PageMoves(), copied_from=copies[:, 0], copied_to=copies[:, 1])
        return moves

    def doubt(self, moves: PageMoves) -> set[int]:
        """Let nobody find what was to be copied: nobody knows which of it was.

        Returns the pages that may hold anything, whose holders have to go. Keys of pages that were
        to be loaded are still those of the host's slots.
        """
        if self.host is not None:
            self.host.forget(moves.stored_slots.tolist())
        doubtful = {*moves.loaded_pages.tolist(), *moves.copied_to.tolist()}
        self._unkey(doubtful)
        return doubtful

    def check_integrity(self, block_tables: list[list[int]]) -> None:
        """Assert that holders, keys and free pages are those of `block_tables`."""
        tables = [[page for page in table if page != NULL_PAGE] for table in block_tables]
        held = Counter(page for table in tables for page in table)
        if any(len(set(table)) < len(table) for table in tables):
            raise AssertionError(f"a table lists a KV page twice: {block_tables}")
        num_holders = [0] * self.num_pages
        for page, count in held.items():
            num_holders[page] = count
        if num_holders != self._num_holders:
            raise AssertionError(f"KV pages held by {held}, counted {self._num_holders}")
        free = [*self._blank, *self._cached]
        if sorted([*held, *free]) != list(range(self.num_pages)):
            raise AssertionError(f"KV pages lost or shared: held {held}, free {free}")
        keyed = {page: key for page, key in enumerate(self._keys) if key is not None}
        if {page: key for key, page in self._pages.items()} != keyed:
            raise AssertionError("keys and pages do not agree")
        if not keyed.keys() >= self._cached.keys() or keyed.keys() & set(self._blank):
            raise AssertionError("a free page is in the wrong list")

    def _unkey(self, pages: Iterable[int]) -> list[bytes]:
        """Take their keys off pages. Returns those that there were."""
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

    def _evict(self) -> int:
        """The free page whose contents are the least likely to be asked for."""
        page, _ = self._cached.popitem(last=False)
        key, self._keys[page] = self._keys[page], None
        del self._pages[key]
        if self.host is not None:
            self.host.store(key, page)
        return page
