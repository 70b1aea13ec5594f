"""Multistage pipelines in shared memory, in Gluon, modeled on CUTLASS's PipelineTmaAsync.

A producer fills the stages in turn, and consumers read them. Each stage has two barriers: the
producer's copies complete `full`; every consumer arrives at `empty` after it has read the stage.

    producer                                       consumer
    state = pipeline.producer_start()              state = pipeline.consumer_start()
    loop:                                          loop:
        pipeline.producer_acquire(state)               pipeline.consumer_wait(state)
        pipeline.producer_expect(state, bytes)         read pipeline.mem at state.stage
        tma_load(.., pipeline.full_barrier(state))     pipeline.consumer_release(state)
        state = state.advance()                        state = state.advance()
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import base_value

from qkernels.gpu.gluon_compat import aggregate


@gluon.jit
def next_stage(stage, NUM_STAGES: gl.constexpr):
    return gl.where(stage == NUM_STAGES - 1, 0, stage + 1)


@aggregate
class PipelineState:
    """The current stage of a producer or consumer, and the barrier phase that it waits for."""

    stage: gl.tensor
    phase: gl.tensor
    num_stages: gl.constexpr

    @gluon.jit
    def advance(self):
        return PipelineState(
            stage=next_stage(self.stage, self.num_stages),
            phase=self.phase ^ (self.stage == self.num_stages - 1).to(gl.int32),
            num_stages=self.num_stages,
        )


@aggregate
class Pipeline:
    """Shared memory of the stages and their barriers."""

    mem: base_value  # a shared memory descriptor, or an aggregate of several
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    num_stages: gl.constexpr

    @gluon.jit
    def producer_start(self, stage=0):
        """Return the state at a stage of the first round. All stages are empty: phase is 1."""
        return PipelineState(
            stage=gl.to_tensor(stage), phase=gl.to_tensor(1), num_stages=self.num_stages
        )

    @gluon.jit
    def consumer_start(self):
        return PipelineState(
            stage=gl.to_tensor(0), phase=gl.to_tensor(0), num_stages=self.num_stages
        )

    @gluon.jit
    def producer_at(self, count):
        """Return the producer's state after `count` stages, for callers that count stages."""
        return PipelineState(
            stage=count % self.num_stages,
            phase=count // self.num_stages & 1 ^ 1,
            num_stages=self.num_stages,
        )

    @gluon.jit
    def consumer_at(self, count):
        return PipelineState(
            stage=count % self.num_stages,
            phase=count // self.num_stages & 1,
            num_stages=self.num_stages,
        )

    @gluon.jit
    def producer_acquire(self, state):
        """Wait until all consumers have released the stage."""
        mbarrier.wait(self.empty.index(state.stage), state.phase)

    @gluon.jit
    def producer_expect(self, state, NUM_BYTES: gl.constexpr, pred=True):
        """Expect NUM_BYTES from TMA: once they are written, the stage is full."""
        mbarrier.expect(self.full.index(state.stage), NUM_BYTES, pred=pred)

    @gluon.jit
    def producer_commit(self, state):
        """Mark the stage as full, for a producer that writes it without TMA."""
        mbarrier.arrive(self.full.index(state.stage), count=1)

    @gluon.jit
    def full_barrier(self, state):
        """Return the barrier on which TMA loads into the stage arrive."""
        return self.full.index(state.stage)

    @gluon.jit
    def consumer_wait(self, state):
        """Wait until the stage is full."""
        mbarrier.wait(self.full.index(state.stage), state.phase)

    @gluon.jit
    def consumer_release(self, state):
        """Release the stage for this consumer, which has read it."""
        mbarrier.arrive(self.empty.index(state.stage), count=1)

    @gluon.jit
    def consumer_release_previous(self, state, pred=True):
        """Release the stage before `state` for this consumer, whose product has ended."""
        previous = gl.where(state.stage == 0, self.num_stages - 1, state.stage - 1)
        mbarrier.arrive(self.empty.index(previous), count=1, pred=pred)


@gluon.jit
def make_pipeline(mem, NUM_STAGES: gl.constexpr, NUM_CONSUMERS: gl.constexpr):
    """Make a pipeline over `mem` with one producer. The caller must call `fence_async_shared`."""
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=NUM_CONSUMERS)
    return Pipeline(mem=mem, full=full, empty=empty, num_stages=NUM_STAGES)
