"""REASONING_PARSERS: value of --reasoning-parser -> format of the reasoning.

A model writes its reasoning before its answer. Some prompts already start or end the reasoning.
"""

from dataclasses import dataclass

from qserve.output_parsing.marker_search import TOKEN
from qserve.output_parsing.notations import harmony

THINK = (("<think>",), ("</think>",))
COHERE = (("<|START_THINKING|>",), ("<|END_THINKING|>",))
# State at the end of a prompt: reasoning has started, may start, or has ended.
OPEN, POSSIBLE, CLOSED = "open", "possible", "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    # (start markers, end markers), each in several spellings
    pairs: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (THINK,)
    is_implied: bool = False  # True: the output starts with reasoning, without a start marker
    ends_at_call: bool = False  # True: a tool call ends reasoning, without an end marker
    answer: tuple[str, str] = ("", "")  # markers around the answer, which are dropped
    is_harmony: bool = False  # True: the reader of calls separates the reasoning, too

    @property
    def start(self) -> str:
        return self.pairs[0][0][0]

    @property
    def end(self) -> str:
        return self.pairs[0][1][0]

    @property
    def starts(self) -> dict[str, tuple[str, ...]]:
        """Start marker -> its end markers."""
        return {start: ends for starts, ends in self.pairs for start in starts}

    @property
    def ends(self) -> tuple[str, ...]:
        return tuple(end for _, ends in self.pairs for end in ends)

    @property
    def tokens(self) -> tuple[str, ...]:
        """Markers that may be special tokens."""
        if self.is_harmony:
            return harmony.MARKERS
        texts = (*self.starts, *self.ends, *self.answer)
        return tuple(each for text in texts for each in TOKEN.findall(text))

    def opened(self, prompt_end: str) -> tuple[str, tuple[str, ...]]:
        """Return the state at the end of a prompt, and the markers that end the reasoning."""
        before = prompt_end.rstrip()
        if before.endswith(self.ends):
            return CLOSED, ()
        for start, ends in self.starts.items():
            if before.endswith(start.rstrip()):
                return OPEN, ends
        return (OPEN, self.ends) if self.is_implied else (POSSIBLE, self.ends)


REASONING_PARSERS = {
    "deepseek_r1": ReasoningFormat(is_implied=True),
    "deepseek_v31": ReasoningFormat(),  # reasons only if the prompt starts the reasoning
    "qwen3": ReasoningFormat(),
    "glm45": ReasoningFormat(),
    "kimi_k2": ReasoningFormat(ends_at_call=True),
    "minimax_m2": ReasoningFormat(is_implied=True),
    "minimax_m3": ReasoningFormat(pairs=((("<mm:think>",), ("</mm:think>",)),)),
    "olmo3": ReasoningFormat(),
    "step3": ReasoningFormat(is_implied=True),
    "seed_oss": ReasoningFormat(pairs=((("<seed:think>",), ("</seed:think>",)),)),
    "mistral": ReasoningFormat(pairs=((("[THINK]",), ("[/THINK]",)), THINK)),
    "gemma4": ReasoningFormat(pairs=((("<|channel>thought\n",), ("<channel|>",)),)),
    "granite": ReasoningFormat(
        pairs=(
            (
                ("Here is my thought process:", "Here's my thought process:"),
                ("Here is my response:", "Here's my response:"),
            ),
            THINK,
        ),
        answer=("<response>", "</response>"),
    ),
    "hunyuan": ReasoningFormat(answer=("<answer>", "</answer>")),
    "ernie45": ReasoningFormat(answer=("<response>", "</response>")),
    "cohere_command3": ReasoningFormat(
        pairs=(COHERE,), answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "cohere_command4": ReasoningFormat(pairs=(COHERE,), answer=("<|START_TEXT|>", "<|END_TEXT|>")),
    "gpt_oss": ReasoningFormat(
        pairs=(((f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",), (harmony.END,)),),
        is_harmony=True,
    ),
}
