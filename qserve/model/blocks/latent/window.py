"""Windows of latent attention: a row sees the last entries, as if an indexer selected them."""

from dataclasses import dataclass

from qkernels.attention.cache import AttentionStep
from qkernels.latent.selected.selected_keys import SelectedKeys
from qkernels.latent.selected.window import keys_in_window


class SharedWindow:
    """The keys in the windows of a step's rows, which the first layer with the window makes."""

    def __init__(self, size: int) -> None:
        self.size = size  # of a window, including the row's own key
        self.selected: SelectedKeys | None = None  # None: no request is longer than the window


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The window of one layer."""

    shared: SharedWindow
    is_first: bool  # the first layer of its stage with this window

    @property
    def size(self) -> int:
        return self.shared.size

    def keys(self, step: AttentionStep, num_rows: int, page_size: int) -> SelectedKeys | None:
        """Return the keys in the windows of the step's rows; None: all keys."""
        if self.is_first:
            self.shared.selected = None
            if step.max_context_len > self.size:
                self.shared.selected = keys_in_window(
                    step, num_rows, window=self.size, page_size=page_size
                )
        return self.shared.selected
