"""Settings of the device that a rank's process applies before it loads a model."""

import torch

from qkernels.gpu import launch
from qserve.config import EngineConfig
from qserve.engine.runner.devices import use_device


def test_plain_kernel_launch_reaches_the_launcher(monkeypatch):
    monkeypatch.setattr(launch, "_PLAIN", False)
    for plain in (True, False):
        config = EngineConfig(model="m", device="cpu", plain_kernel_launch=plain)
        use_device(torch.device("cpu"), config)
        assert launch._PLAIN is plain
