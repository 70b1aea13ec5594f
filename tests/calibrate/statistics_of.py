"""Statistics of one layer, collected in one call."""

from torch import nn

from calibrate.calibration.capture import HiddenStates, add_statistics, empty_statistics
from calibrate.calibration.layer_runner import LayerRunner
from calibrate.calibration.statistics import InputStatistics


def collect_statistics(
    runner: LayerRunner,
    module: nn.Module,
    layer: int,
    hidden: HiddenStates,
    reference: HiddenStates | None = None,
) -> dict[str, InputStatistics]:
    """Run the layer over all windows. Returns each linear's input statistics by local name.

    `reference` holds the same windows in the float model. Raises InputError on a NaN, naming the
    linear.
    """
    statistics = empty_statistics(runner, layer, module.state_dict())
    add_statistics(statistics, runner, module, layer, hidden, reference)
    for stats in dict.fromkeys(statistics.values()):
        stats.check()
    return statistics
