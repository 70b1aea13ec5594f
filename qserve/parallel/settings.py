"""Settings for several devices: ranks of one engine, and several engines."""

from dataclasses import dataclass

from formats.errors import InputError
from qserve.command_line.setting import setting

EXECUTORS = ("mp", "ray")
ALL_REDUCES = ("auto", "nccl")


@dataclass(frozen=True, kw_only=True)  # no slots: a class may have one such base only
class ParallelSettings:
    """Settings that EngineConfig inherits."""

    tensor_parallel_size: int = setting(
        1, "number of GPUs that share each layer; on a CPU: of processes", low=1, high=64
    )
    pipeline_parallel_size: int = setting(
        1, "number of pipeline stages, each with some layers on its own GPUs", low=1, high=64
    )
    prefill_context_parallel_size: int = setting(
        1,
        "number of GPUs, or of groups of --tensor-parallel-size GPUs, that divide the tokens of a"
        " long prompt; each one holds all weights and KV pages and repeats the decode steps",
        low=1,
        high=64,
    )
    prefill_context_parallel_min_tokens: int = setting(
        1024,
        "with --prefill-context-parallel-size: a prompt's tokens in a step are divided over the"
        " GPUs if there are at least this many",
        low=1,
    )
    data_parallel_size: int = setting(
        1,
        "number of engines, each with the whole model, its own GPUs and its own KV pages; requests"
        " are divided among them",
        low=1,
        high=64,
    )
    data_parallel_rank: int | None = setting(
        None,
        "run only this one of the --data-parallel-size engines, on its GPUs; default: all",
        low=0,
        high=63,
    )
    data_parallel_address: str | None = setting(
        None,
        "with --data-parallel-rank and --enable-expert-parallel: address at which the engines"
        " connect; file:///PATH of a new file, or tcp://HOST:PORT",
    )
    prefill_engines: int = setting(
        0,
        "number of additional engines, on their own GPUs, that only compute prompts and send the KV"
        " pages from GPU to GPU to the engines that decode",
        low=0,
        high=64,
    )
    prefill_tensor_parallel_size: int | None = setting(
        None,
        "--tensor-parallel-size of --prefill-engines; default: that of the other engines",
        low=1,
        high=64,
    )
    prefill_engine_min_tokens: int = setting(
        256,
        "with --prefill-engines: prompts with fewer uncached tokens are computed by the engine that"
        " decodes them",
        low=1,
    )
    gpu_offset: int = setting(
        0,
        "index of the first GPU to use, for several servers on one host that exchange KV pages",
        low=0,
        high=255,
    )
    distributed_executor_backend: str = setting(
        "mp",
        "how the ranks of a model on several devices are started; mp: as processes on this "
        "machine; ray: by actors in a cluster",
        EXECUTORS,
        aliases={"uni": "mp"},
    )
    all_reduce: str = setting(
        "auto",
        "all-reduce implementation; auto: kernels over peer memory if every GPU can access the "
        "memory of the others, else NCCL",
        ALL_REDUCES,
    )

    enable_expert_parallel: bool = setting(
        False,
        "for mixtures of experts on several GPUs: each GPU holds some experts whole, instead of a"
        " slice of every expert",
    )
    expert_placement_strategy: str = setting(
        "linear",
        "with --enable-expert-parallel: how experts are assigned to GPUs; linear: contiguous"
        " ranges; round_robin: one after another; or a file from --record-expert-loads: balanced by"
        " the recorded loads",
    )
    record_expert_loads: str | None = setting(
        None,
        "count the tokens routed to each expert, and write the counts to this file when the engine"
        " exits; disables CUDA graphs",
    )

    def check_experts(self) -> None:
        """Raise InputError if settings of expert parallelism contradict each other."""
        if self.expert_placement_strategy != "linear" and not self.enable_expert_parallel:
            raise InputError(
                f"--expert-placement-strategy {self.expert_placement_strategy}",
                "requires --enable-expert-parallel",
                "add the flag",
            )
        if self.enable_expert_parallel and self.expert_parallel_size == 1:
            raise InputError(
                "--enable-expert-parallel",
                "divides experts over the GPUs of --tensor-parallel-size, which is 1",
                "raise --tensor-parallel-size or --data-parallel-size",
            )
        self._check_shared_experts()
        if self.record_expert_loads is None:
            return
        for flag, value in (
            ("--pipeline-parallel-size", self.pipeline_parallel_size),
            ("--prefill-context-parallel-size", self.prefill_context_parallel_size),
            ("--data-parallel-size", self.data_parallel_size),
        ):
            if value > 1:
                raise InputError(
                    "--record-expert-loads",
                    f"counts in one process, but {flag} is {value}",
                    f"record without {flag}: loads depend only on the model and the requests",
                )

    def _check_shared_experts(self) -> None:
        """Raise InputError if engines are to share experts but other settings do not allow it."""
        is_given = self.data_parallel_address is not None
        if not self.shares_experts:
            if is_given:
                raise InputError(
                    "--data-parallel-address",
                    "is for engines that share experts",
                    "add --data-parallel-size and --enable-expert-parallel",
                )
            return
        if self.data_parallel_rank is not None and not is_given:
            raise InputError(
                f"--data-parallel-rank {self.data_parallel_rank}",
                "requires the address where the engines that share experts connect",
                "add --data-parallel-address",
            )
        for flag, value in (
            ("--pipeline-parallel-size", self.pipeline_parallel_size),
            ("--prefill-context-parallel-size", self.prefill_context_parallel_size),
            ("--prefill-engines", self.prefill_engines + 1),
        ):
            if value > 1:
                raise InputError(
                    f"--data-parallel-size {self.data_parallel_size} --enable-expert-parallel",
                    f"does not work with {flag}",
                    "remove it: each engine has one GPU, and experts on all of them",
                )

    @property
    def shares_experts(self) -> bool:
        """True if data-parallel engines of one GPU each share the experts."""
        is_one = self.tensor_parallel_size == 1
        return self.enable_expert_parallel and self.data_parallel_size > 1 and is_one

    @property
    def expert_parallel_size(self) -> int:
        """Number of GPUs that experts are divided over."""
        return self.data_parallel_size if self.shares_experts else self.tensor_parallel_size

    def check_engines(self) -> None:
        """Raise InputError if settings of several engines contradict each other."""
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

        self._check_prefill_engines()

    def _check_prefill_engines(self) -> None:
        if self.prefill_engines == 0:
            if self.prefill_tensor_parallel_size is not None:
                raise InputError(
                    "--prefill-tensor-parallel-size", "requires --prefill-engines", "add the flag"
                )
            return
        for flag, is_given, remedy in (
            ("--data-parallel-rank", self.data_parallel_rank is not None, "remove it"),
            (
                "--pipeline-parallel-size",
                self.pipeline_parallel_size > 1,
                "use --tensor-parallel-size",
            ),
            (
                "--prefill-context-parallel-size",
                self.prefill_context_parallel_size > 1,
                "use --prefill-tensor-parallel-size",
            ),
            (
                "--distributed-executor-backend ray",
                self.distributed_executor_backend == "ray",
                "use mp: KV pages pass from GPU to GPU of one host",
            ),
        ):
            if is_given:
                raise InputError("--prefill-engines", f"does not work with {flag}", remedy)

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute one model, each with one GPU."""
        shards = self.tensor_parallel_size * self.pipeline_parallel_size
        return shards * self.prefill_context_parallel_size

    @property
    def num_engines(self) -> int:
        """Number of engines that these settings start."""
        return self.data_parallel_size if self.data_parallel_rank is None else 1

    @property
    def first_device(self) -> int:
        """Index of this engine's first GPU."""
        return self.gpu_offset + (self.data_parallel_rank or 0) * self.num_ranks
