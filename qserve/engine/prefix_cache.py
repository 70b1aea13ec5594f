"""PrefixCache: a request's tokens as pages that are there already. Knows requests and page numbers.

A full page can be found from the moment that the step that fills it is planned: steps run in their
order, and within one each layer writes all its keys before it reads any. Of a token that was
sampled the host learns later; its page waits for that.
"""

from collections.abc import Collection

from qserve.engine.kv_pages import NULL_PAGE, PagePool
from qserve.engine.prefix_keys import extend_keys, root_key
from qserve.engine.request import Request


class PrefixCache:
    """Which pages a request can take over, and which of its own others can."""

    def __init__(self, pool: PagePool, *, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        # tokens that were looked for, and those that were there, of requests when first admitted
        self._num_queries = self._num_hits = 0
        self._generation = 0
        self._last: Request | None = None  # whose keys were made last

    def add(self, request: Request) -> None:
        """Make the keys of a new request: 0.5 us for each page of 16 tokens."""
        if not self.enabled:
            return
        last = self._last
        if (
            last is not None
            and last.cache_salt == request.cache_salt
            and last.num_prompt_tokens == request.num_prompt_tokens
            and last.token_ids[: last.num_prompt_tokens] == request.token_ids
        ):  # another output of the same prompt
            num_pages = request.num_prompt_tokens // self.pool.page_size
            request.page_keys = last.page_keys[:num_pages]
        self._extend_keys(request)
        self._last = request

    def num_cached(self, request: Request) -> int:
        """Tokens of a waiting request that need not be computed now."""
        keys = self._wanted(request)
        pages = self.pool.match(keys)
        return (len(pages) + self._num_on_host(keys, len(pages))) * self.pool.page_size

    def num_pages_needed(self, request: Request) -> int:
        """Free pages that a waiting request takes: of those that it finds, only what nobody holds.

        Looks for them only where there may not be enough.
        """
        needed = self.pool.pages_for(request.num_tokens)
        if needed <= self.pool.num_free:
            return needed
        return needed - self.pool.num_held(self.pool.match(self._wanted(request)))

    def will_share(self, request: Request, other: Request) -> bool:
        """Whether the next page that `other` computes is one that `request` could then take."""
        index = other.num_published
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
        pages = pool.match(keys)
        num_found = len(pages) + self._num_on_host(keys, len(pages))
        pool.share_(table, pages)
        if num_found > len(pages):
            pool.load_(table, keys[len(pages) : num_found])
        pool.grow_(table, request.num_tokens)
        request.num_published = num_found
        request.num_computed = num_found * pool.page_size
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

    def take_counts(self) -> tuple[int, int]:
        """Tokens that were looked for, and those that were there, since the last call."""
        counts = self._num_queries, self._num_hits
        self._num_queries = self._num_hits = 0
        return counts

    def keep_private(self, request: Request) -> None:
        """Publish nothing more of a running request."""
        request.num_published = self.pool.num_pages

    def reset(self, requests: Collection[Request]) -> None:
        """Forget all keys, as the weights may be others from now on.

        `requests`: all that there are. Those that run have tokens from before in their pages, so
        what they compute is not for others; preempted ones begin anew.
        """
        self.pool.withdraw_all()
        self._generation += 1
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

    def _num_on_host(self, keys: list[bytes], start: int) -> int:
        return 0 if self.pool.host is None else self.pool.host.match(keys[start:])

    def _extend_keys(self, request: Request) -> None:
        keys = request.page_keys
        last = keys[-1] if keys else root_key(salt=request.cache_salt, generation=self._generation)
        extend_keys(keys, request.token_ids, page_size=self.pool.page_size, last=last)
