"""The pool of KV pages: who owns which. Knows page numbers, not their contents."""

from collections import deque

# In a block table: a page that was given back, since no query sees its positions any more.
NULL_PAGE = -1


class PagePool:
    """Hands out page numbers 0..num_pages-1, each to one owner at a time.

    The page that has been free for longest goes first: what was computed last stays longest.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size  # tokens of one page
        self._free = deque(range(num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def can_grow(self, block_table: list[int], num_tokens: int) -> bool:
        return self.pages_for(num_tokens) - len(block_table) <= self.num_free

    def grow_(self, block_table: list[int], num_tokens: int) -> None:
        """Add pages to `block_table` until it holds `num_tokens` positions."""
        for _ in range(self.pages_for(num_tokens) - len(block_table)):
            block_table.append(self._free.popleft())

    def release_(self, block_table: list[int]) -> None:
        """Take back every page of `block_table` and empty it."""
        self._free.extend(page for page in block_table if page != NULL_PAGE)
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

    def check_integrity(self, block_tables: list[list[int]]) -> None:
        """Assert that the pages in use by `block_tables` and the free ones are each page once."""
        used = [page for table in block_tables for page in table if page != NULL_PAGE]
        if sorted(used + list(self._free)) != list(range(self.num_pages)):
            raise AssertionError(f"KV pages lost or shared: used {used}, free {list(self._free)}")
