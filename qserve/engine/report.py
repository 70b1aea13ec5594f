"""EngineReport: the engine's statistics after a step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Load of the engine and results of its last step. All zeros if the engine is dead."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # tokens that the waiting requests have to compute
    num_pages_used: int = 0
    num_pages: int = 0
    num_step_tokens: int = 0  # tokens of the step; 0: no step since the last report
    num_preempted: int = 0
    num_prefix_queries: int = 0  # tokens looked up in the prefix cache since the last report
    num_prefix_hits: int = 0  # number of these tokens that were found
    running_adapters: tuple[str, ...] = ()  # names of adapters that running requests use
    waiting_adapters: tuple[str, ...] = ()  # names of adapters that requests wait for
    # with speculation: number of verifies, of drafts, and of accepted drafts at each position
    drafts: tuple[int, ...] = ()
    num_external_queries: int = 0  # tokens looked up in other engines' pages
    num_external_hits: int = 0  # number of these tokens that were found
    is_paused: bool = False  # an operator has paused generation
    is_sleeping: bool = False  # weights or pages are not on the device
    queue_seconds: tuple[float, ...] = ()  # time in the queue, per request that ran its first step
