"""For training loops: the engine's operations in transformers models; weights for a server."""

from qserve.training.broadcast import WeightBroadcast
from qserve.training.operations import use_engine_operations
from qserve.training.send import send_weights

__all__ = ["WeightBroadcast", "send_weights", "use_engine_operations"]
