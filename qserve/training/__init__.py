"""Operations of the engine inside a transformers model that is trained."""

from qserve.training.operations import use_engine_operations

__all__ = ["use_engine_operations"]
