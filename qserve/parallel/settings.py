"""Settings of a model on several devices: ranks of one engine, and several engines."""

from dataclasses import dataclass

from formats.errors import InputError
from qserve.command_line.setting import setting

EXECUTORS = ("mp", "ray")
ALL_REDUCES = ("auto", "nccl")


@dataclass(frozen=True, kw_only=True)  # no slots: a class may have one such base only
class ParallelSettings:
    """Settings that EngineConfig inherits."""

    tensor_parallel_size: int = setting(
        1, "GPUs that each layer is split over; on a CPU: processes", low=1, high=64
    )
    pipeline_parallel_size: int = setting(
        1, "pipeline stages that the layers are split into, each on its own GPUs", low=1, high=64
    )
    data_parallel_size: int = setting(
        1,
        "engines that each run the whole model, on their own GPUs and with their own KV pages;"
        " requests are divided among them",
        low=1,
        high=64,
    )
    data_parallel_rank: int | None = setting(
        None,
        "run this one of the --data-parallel-size engines alone, on its GPUs; default: all",
        low=0,
        high=63,
    )
    distributed_executor_backend: str = setting(
        "mp",
        "what starts the ranks of a model on several devices; mp: processes on this "
        "machine; ray: actors in a cluster",
        EXECUTORS,
    )
    all_reduce: str = setting(
        "auto",
        "how GPUs sum their results; auto: directly through peer memory where the GPUs can "
        "reach each other's, else NCCL",
        ALL_REDUCES,
    )

    def check_engines(self) -> None:
        """Raise InputError unless the settings of several engines agree."""
        size, rank = self.data_parallel_size, self.data_parallel_rank
        if rank is not None and rank >= size:
            raise InputError(
                f"--data-parallel-rank {rank}",
                f"expected less than --data-parallel-size ({size})",
                f"the engines are numbered 0 to {size - 1}",
            )
        if size > 1 and self.distributed_executor_backend == "ray":
            raise InputError(
                f"--data-parallel-size {size}",
                "does not work with --distributed-executor-backend ray",
                "run several engines in a cluster by `qserve serve --backend ray --replicas`",
            )

    @property
    def num_ranks(self) -> int:
        """Number of processes, each with a GPU, that compute one model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_engines(self) -> int:
        """Number of engines that these settings start."""
        return self.data_parallel_size if self.data_parallel_rank is None else 1

    @property
    def first_device(self) -> int:
        """Index of the first of this engine's GPUs."""
        return (self.data_parallel_rank or 0) * self.num_ranks
