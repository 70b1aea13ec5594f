"""EngineReport: what the engine tells of itself after a step. Numbers alone; knows no requests."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What the engine holds, and what its last step did. All zero: there is no engine."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # that the waiting requests have to compute
    num_pages_used: int = 0
    num_pages: int = 0
    num_step_tokens: int = 0  # that the step computed; 0: there was none since the last report
    num_preempted: int = 0
    num_prefix_queries: int = 0  # tokens that were looked for in the prefix cache since then
    num_prefix_hits: int = 0  # those of them that were there
    running_adapters: tuple[str, ...] = ()  # by name
    waiting_adapters: tuple[str, ...] = ()  # that requests wait for
    # with speculation: verifies, drafts, and of each position the drafts that became output
    drafts: tuple[int, ...] = ()
    num_external_queries: int = 0  # tokens that were looked for in other engines' pages
    num_external_hits: int = 0  # those of them that came from there
    queue_seconds: tuple[float, ...] = ()  # of each request whose first step it was
