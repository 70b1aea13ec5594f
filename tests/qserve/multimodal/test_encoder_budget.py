"""EncoderBudget: where chunks are cut, what is encoded, what is dropped."""

from dataclasses import replace
from hashlib import sha256

from qserve.engine.request import Request
from qserve.engine.scheduling.encoder_budget import EncoderBudget, MediaPlan
from qserve.model.blocks.rotary import Rotary
from qserve.multimodal.media import MediaItem
from qserve.params.sampling_params import SamplingParams


def item(offset: int, length: int, content: str, is_embed: bytes = b"") -> MediaItem:
    digest = sha256(content.encode()).hexdigest()
    return MediaItem(kind="image", digest=digest, offset=offset, length=length, is_embed=is_embed)


def request(*media: MediaItem) -> Request:
    return Request(
        request_id="r",
        token_ids=[1] * 100,
        num_prompt_tokens=100,
        max_tokens=1,
        params=SamplingParams(),
        seed=0,
        stop_token_ids=frozenset(),
        eos_token_ids=frozenset(),
        media=media,
    )


def step(budget: EncoderBudget, *chunks) -> tuple[list[int], MediaPlan | None]:
    budget.begin_step()
    taken = [budget.take(*chunk) for chunk in chunks]
    return taken, budget.end_step()


def plan_of(encode, dropped, *for_drafts: MediaItem) -> MediaPlan:
    return MediaPlan(
        encode=encode,
        dropped=tuple(each.digest for each in dropped),
        for_drafts=frozenset(each.digest for each in for_drafts),
    )


A, B, C = item(10, 6, "a"), item(20, 6, "b"), item(40, 6, "c")


def test_chunk_ends_before_the_item_that_does_not_fit():
    budget = EncoderBudget(rows_per_step=8, capacity=100)
    (count,), plan = step(budget, (request(A, B, C), 0, 30))
    assert (count, plan.encode) == (20, (A,))
    (count,), plan = step(budget, (request(A, B, C), 20, 15))
    assert (count, plan.encode) == (15, (B,))
    # the next chunk begins inside an item whose rows are there
    (count,), plan = step(budget, (request(A, B, C), 22, 10))
    assert (count, plan) == (10, plan_of((), ()))
    assert step(budget, (request(A, B, C), 50, 10)) == ([10], None)


def test_one_item_may_exceed_the_budget_and_the_room_if_it_is_alone():
    large = item(0, 50, "large")
    budget = EncoderBudget(rows_per_step=8, capacity=20)
    assert step(budget, (request(A), 0, 30))[0] == [30]
    (first, second), plan = step(budget, (request(A), 12, 2), (request(large), 0, 30))
    assert (first, second) == (2, 0), "the step reads the item whose room it would need"
    (count,), plan = step(budget, (request(large), 0, 30))
    assert (count, plan) == (30, plan_of((large,), (A,)))
    assert budget.num_kept == 50


def test_equal_items_are_encoded_once_and_the_oldest_is_dropped_first():
    budget = EncoderBudget(rows_per_step=100, capacity=12)
    (_, _), plan = step(budget, (request(A), 0, 30), (request(item(3, 6, "a")), 0, 30))
    assert plan.encode == (A,)
    step(budget, (request(B), 0, 30))
    step(budget, (request(A), 0, 30))
    _, plan = step(budget, (request(C), 0, 50))
    assert plan == plan_of((C,), (B,))
    _, plan = step(budget, (request(B), 25, 1))
    assert plan == plan_of((B,), (A,)), "encoded again for its last row"


def test_rows_are_embeddings_not_positions():
    budget = EncoderBudget(rows_per_step=100, capacity=100)
    step(budget, (request(item(0, 6, "rows", b"\1\1\0\1\1\0")), 0, 6))
    assert budget.num_kept == 4


def test_item_whose_rows_see_each_other_is_computed_in_one_step():
    mutual = replace(A, is_mutual=True)
    budget = EncoderBudget(rows_per_step=100, capacity=100)
    assert step(budget, (request(mutual), 0, 12)) == ([10], None), "the text before it"
    assert step(budget, (request(mutual), 10, 5)) == ([0], None)
    # a prefix hit may end inside it
    assert step(budget, (request(mutual), 12, 3)) == ([0], None)
    (count,), plan = step(budget, (request(mutual), 12, 4))
    assert (count, plan.encode) == (4, (mutual,))


def test_after_a_failed_step_nothing_is_kept():
    budget = EncoderBudget(rows_per_step=100, capacity=100)
    step(budget, (request(A), 0, 30))
    budget.reset()
    (count,), plan = step(budget, (request(A), 12, 3))
    assert (count, plan) == (3, plan_of((A,), (A,)))


def test_a_drafter_reads_the_embedding_after_a_chunk():
    """The step encodes it; if it cannot, the row before it waits, but never without end."""
    budget = EncoderBudget(rows_per_step=8, capacity=12, looks_ahead=True)
    (count,), plan = step(budget, (request(A), 0, 10))
    assert (count, plan) == (10, plan_of((A,), (), A))
    assert step(budget, (request(A), 0, 9)) == ([9], None)
    (count,), plan = step(budget, (request(A, B, C), 12, 8))
    assert (count, plan) == (8, plan_of((B,), (), A, B))
    # A and B are read and fill the room: C is encoded with the last row before it
    beside = item(26, 6, "c")
    (first, second), plan = step(budget, (request(A), 12, 4), (request(A, B, beside), 22, 4))
    assert ((first, second), plan) == ((4, 3), plan_of((), (), A, B))
    (count,), plan = step(budget, (request(A, B, beside), 25, 4))
    assert (count, plan) == (4, plan_of((beside,), (A,), beside, B))
    # one row is left, and both items are wider than the room together
    budget = EncoderBudget(rows_per_step=6, capacity=6, looks_ahead=True)
    (count,), plan = step(budget, (request(B, beside), 25, 1))
    assert (count, plan) == (1, plan_of((B,), (), B))


def test_buffers_of_graphs_with_media_are_counted_whole(vision):
    """Embeddings, what deeper layers add, and rotations, for the tokens of the largest graph."""
    runner = vision("qwen3_vl").engine(max_num_batched_tokens=24).workers.runner
    buffers, decoder = runner.media_buffers(), runner.decoder
    (rope,) = {each for each in decoder.modules() if isinstance(each, Rotary)}
    levels = vision("qwen3_vl").processor.config.num_levels
    assert levels
    embeds = (1 + levels) * decoder.config.hidden_size * 4
    assert buffers.nbytes == 24 * (embeds + rope.cos_sin.shape[1] * 4 + 8)
