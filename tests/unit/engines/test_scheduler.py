"""The scheduler with a fake engine: integers only."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.engines.builtin.blocks import BlockPool
from trainfer.engines.builtin.scheduler import DecodeStep, PrefillStep, Scheduler, Tracked
from trainfer.engines.limits import EngineLimits


class Memory:
    """Each cache row remembers the tokens it was computed from; each pass's logits likewise."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rows: dict[int, tuple[int, ...]] = {}
        self.logits: dict[int, tuple[int, ...]] = {}

    def row(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def prefill(self, step: PrefillStep) -> None:
        for item in step.passes:
            for position in range(len(item.token_ids)):
                self.rows[self.row(item.blocks, position)] = item.token_ids[: position + 1]
            self.logits[item.key] = item.token_ids
        for sequence, key in zip(step.sequences, step.keys, strict=True):
            assert self.logits[key] == tokens_of(sequence)

    def decode(self, step: DecodeStep) -> None:
        size = self.block_size
        self.rows.update(
            {t * size + o: self.rows.get(s * size + o, ()) for s, t in step.copies for o in range(size)}
        )
        for sequence in step.sequences:
            tokens = tokens_of(sequence)
            self.rows[self.row(sequence.blocks, len(tokens) - 1)] = tokens
        for sequence in step.sequences:
            tokens = tokens_of(sequence)
            for position in range(len(tokens)):
                assert self.rows[self.row(sequence.blocks, position)] == tokens[: position + 1]


def tokens_of(sequence: Tracked) -> tuple[int, ...]:
    return sequence.prompt_ids + tuple(sequence.sampled_ids)


def run(
    prompts: list[tuple[int, ...]], new_tokens: list[int], limits: EngineLimits, num_blocks: int
) -> tuple[Scheduler, list[PrefillStep | DecodeStep]]:
    """Play the engine; members of a group sample different tokens."""
    scheduler = Scheduler(prompts, limits, num_blocks)
    memory = Memory(limits.block_size)
    steps: list[PrefillStep | DecodeStep] = []
    while not scheduler.is_done:
        step = scheduler.next_step()
        steps.append(step)
        assert len(step.sequences) <= limits.max_num_seqs
        if isinstance(step, PrefillStep):
            assert sum(len(item.token_ids) for item in step.passes[1:]) <= limits.max_num_batched_tokens
            memory.prefill(step)
        else:
            memory.decode(step)
        for sequence in step.sequences:
            sequence.sampled_ids.append(1000 * sequence.index + len(sequence.sampled_ids))
            if len(sequence.sampled_ids) == new_tokens[sequence.index]:
                scheduler.finish(sequence)
        memory.logits = {key: kept for key, kept in memory.logits.items() if key in scheduler.live_keys}
    return scheduler, steps


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_every_sequence_reads_only_its_own_tokens_and_all_blocks_come_back(data):
    prompts: list[tuple[int, ...]] = []
    for _ in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.integers(1, 12))
        prompt = tuple(data.draw(st.integers(0, 2)) for _ in range(length))
        prompts += [prompt] * data.draw(st.integers(1, 4))
    prompts = data.draw(st.permutations(prompts))
    new_tokens = [data.draw(st.integers(1, 9)) for _ in prompts]
    size = data.draw(st.integers(1, 5))
    limits = EngineLimits(
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_num_batched_tokens=data.draw(st.integers(1, 30)),
        block_size=size,
        share_prefixes=data.draw(st.booleans()),
    )
    least = max(-(-(len(p) + n) // size) for p, n in zip(prompts, new_tokens, strict=True))
    num_blocks = least + data.draw(st.integers(0, 20))
    scheduler, _ = run(prompts, new_tokens, limits, num_blocks)
    assert scheduler._pool.num_free == num_blocks


def test_a_group_is_computed_once_and_its_partial_block_copied_for_all_but_one():
    prompt = tuple(range(6))  # one full block of 4 and half of another
    _, steps = run([prompt] * 3, [2, 2, 2], EngineLimits(block_size=4), 20)
    first, second = steps
    assert isinstance(first, PrefillStep)
    assert isinstance(second, DecodeStep)
    assert len(first.passes) == 1
    assert len(first.sequences) == 3
    assert len(second.copies) == 2
    assert {source for source, _ in second.copies} == {first.passes[0].blocks[1]}


def test_without_sharing_every_member_is_computed():
    limits = EngineLimits(block_size=4, share_prefixes=False)
    _, steps = run([(1, 2)] * 3, [2, 2, 2], limits, 20)
    assert isinstance(steps[0], PrefillStep)
    assert len(steps[0].passes) == 3


def test_a_late_member_still_finds_the_prefix():
    limits = EngineLimits(block_size=4, max_num_seqs=2)
    _, steps = run([(1, 2, 3)] * 5, [3] * 5, limits, 20)
    assert sum(len(step.passes) for step in steps if isinstance(step, PrefillStep)) == 1


def test_the_youngest_is_preempted_and_recomputed_with_what_it_sampled():
    prompts = [(1,) * 4, (2,) * 4]
    scheduler, steps = run(prompts, [8, 8], EngineLimits(block_size=4), 4)
    assert scheduler.num_preemptions == 1
    again = [step for step in steps if isinstance(step, PrefillStep)][1]
    assert again.sequences[0].index == 1
    assert again.passes[0].token_ids[:4] == prompts[1]
    assert len(again.passes[0].token_ids) > 4


def test_a_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert 0 not in blocks
    pool.share(blocks[:1])
    pool.release(blocks)
    assert pool.num_free == 1
    assert not pool.is_shared(blocks[0])
    pool.release(blocks[:1])
    assert pool.num_free == 2
