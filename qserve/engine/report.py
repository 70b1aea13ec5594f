"""EngineReport: the engine's statistics after a step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Contents of the engine and results of its last step. All zeros: there is no engine."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # tokens that the waiting requests have to compute
    num_pages_used: int = 0
    num_pages: int = 0
    num_step_tokens: int = 0  # computed by the step; 0: no step since the last report
    num_preempted: int = 0
    num_prefix_queries: int = 0  # tokens looked up in the prefix cache since then
    num_prefix_hits: int = 0  # those of them that were found
    running_adapters: tuple[str, ...] = ()  # by name
    waiting_adapters: tuple[str, ...] = ()  # that requests wait for
    # with speculation: verifies, drafts, and the accepted drafts of each position
    drafts: tuple[int, ...] = ()
    num_external_queries: int = 0  # tokens looked up in other engines' pages
    num_external_hits: int = 0  # those of them that were found there
    is_paused: bool = False  # requests wait for an operator
    is_sleeping: bool = False  # weights or pages are not on the device
    queue_seconds: tuple[float, ...] = ()  # of each request whose first step it was
