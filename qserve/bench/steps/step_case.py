"""StepCase: a step to measure, with its exact requests, parsed from a text.

Examples:
decode=32*1@8192        32 requests with 1 new token each, after 8192 computed tokens
prefill=8192            one request with 8192 new tokens
chunk=512@4096c         one request with 512 tokens inside of its prompt: no token is sampled
verify=16*4@4096:3      16 requests that verify 3 drafts each: 4 tokens, each of which is sampled
mix=2048,32*1@4096      several kinds of requests in one step: decodes come first, as in the engine
"""

import re
from dataclasses import dataclass

from formats.errors import InputError

PIECE = re.compile(r"(?:(\d+)\*)?(\d+)(?:@(\d+))?(c)?(?::(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRequests:
    """Equal requests of a case. The names are those of vLLM."""

    query_len: int  # number of new tokens of each request
    kv_len: int = 0  # number of tokens computed in earlier steps
    num_draft_tokens: int = 0
    chunked: bool = False  # True: the new tokens end before the prompt does
    count: int = 1  # number of requests

    @property
    def num_sampled(self) -> int:
        return 0 if self.chunked else 1 + self.num_draft_tokens

    @property
    def decodes(self) -> bool:
        """True if every token samples."""
        return self.num_sampled == self.query_len


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """One step to measure."""

    name: str
    requests: tuple[CaseRequests, ...]

    @classmethod
    def parse(cls, text: str) -> "StepCase":
        """Parse a case. Raises InputError."""
        name, equals, rest = text.partition("=")
        found = [PIECE.fullmatch(piece) for piece in rest.split(",")]
        if not name or not equals or not all(found):
            raise InputError(
                "--case",
                f"expected NAME=[N*]TOKENS[@CONTEXT][c][:DRAFTS],..., found {text!r}",
                "such as decode=32*1@8192",
            )
        requests = [
            CaseRequests(
                count=int(match[1] or 1),
                query_len=int(match[2]),
                kv_len=int(match[3] or 0),
                chunked=bool(match[4]),
                num_draft_tokens=int(match[5] or 0),
            )
            for match in found
        ]
        requests.sort(key=lambda each: not each.decodes)
        case = cls(name=name, requests=tuple(requests))
        for each in case.requests:
            if not each.count or not each.query_len or each.num_sampled > each.query_len:
                raise InputError(
                    "--case",
                    f"expected at least one token per draft and request, found {text!r}",
                    "give more tokens, or fewer drafts",
                )
        return case

    @property
    def num_requests(self) -> int:
        return sum(each.count for each in self.requests)

    @property
    def num_tokens(self) -> int:
        return sum(each.count * each.query_len for each in self.requests)

    @property
    def longest(self) -> int:
        return max(each.kv_len + each.query_len for each in self.requests)

    def num_pages(self, page_size: int) -> int:
        return sum(
            each.count * -(-(each.kv_len + each.query_len) // page_size) for each in self.requests
        )


def decode_cases(batches: list[int], contexts: list[int]) -> list[StepCase]:
    return [
        StepCase.parse(f"decode-{batch}x{context}={batch}*1@{context}")
        for context in contexts
        for batch in batches
    ]


def prefill_cases(tokens: list[int], contexts: list[int]) -> list[StepCase]:
    return [
        StepCase.parse(f"prefill-{count}x{context}={count}@{context}")
        for context in contexts
        for count in tokens
    ]
