"""Decode steps that draw several tokens before the host looks: the scheduler takes their blocks ahead."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.engines.builtin.scheduler import DecodeStep, PrefillStep, Scheduler, Tracked
from trainfer.engines.limits import EngineLimits


class Player:
    """An engine that draws ``burst`` tokens a step; each cache row remembers the tokens that it was computed from."""

    def __init__(self, ends: list[int], size: int, burst: int) -> None:
        self.ends, self.size, self.burst = ends, size, burst
        self.rows: dict[tuple[int, int], tuple[int, ...]] = {}
        self.results: list[list[int]] = [[] for _ in ends]

    def append(self, sequence: Tracked) -> bool:
        sequence.sampled_ids.append(1000 * sequence.index + len(sequence.sampled_ids))
        self.results[sequence.index] = list(sequence.sampled_ids)
        return len(sequence.sampled_ids) == self.ends[sequence.index]

    def prefill(self, step: PrefillStep) -> list[Tracked]:
        for item in step.passes:
            for p in range(len(item.token_ids)):
                self.rows[item.blocks[p // self.size], p % self.size] = item.token_ids[: p + 1]
        return [sequence for sequence in step.sequences if self.append(sequence)]

    def decode(self, step: DecodeStep) -> list[Tracked]:
        offsets = range(self.size)
        held = [[self.rows.get((source, o), ()) for o in offsets] for source, _ in step.copies]
        for (_, target), old in zip(step.copies, held, strict=True):
            self.rows |= {(target, o): old[o] for o in offsets}
        return [sequence for sequence in step.sequences if self.draw(sequence)]

    def draw(self, sequence: Tracked) -> bool:
        for _ in range(self.burst):
            tokens = sequence.prompt_ids + tuple(sequence.sampled_ids)
            last = len(tokens) - 1
            self.rows[sequence.blocks[last // self.size], last % self.size] = tokens
            for p in range(len(tokens)):
                assert self.rows[sequence.blocks[p // self.size], p % self.size] == tokens[: p + 1]
            if self.append(sequence):
                return True
        return False


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_token_of_a_burst_has_a_block_of_its_own(data):
    size, burst = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    groups = data.draw(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 3)), min_size=1, max_size=4))
    prompts = [tuple(range(-n, 0)) for n, count in groups for _ in range(count)]
    new = [data.draw(st.integers(1, 12)) for _ in prompts]
    stops = [data.draw(st.integers(1, 20)) for _ in prompts]
    longest = max(-(-(len(p) + n) // size) for p, n in zip(prompts, new, strict=True))
    blocks = data.draw(st.integers(longest, 3 * longest + 4))
    limits = EngineLimits(
        block_size=size, max_num_seqs=data.draw(st.integers(1, 5)), max_num_batched_tokens=16
    )
    ends = [min(pair) for pair in zip(new, stops, strict=True)]
    player = Player(ends, size, burst)
    scheduler = Scheduler(prompts, limits, blocks, max_new_tokens=new, lookahead=burst)
    while not scheduler.is_done:
        step = scheduler.next_step()
        for sequence in player.prefill(step) if isinstance(step, PrefillStep) else player.decode(step):
            scheduler.finish(sequence)
    assert player.results == [[1000 * index + i for i in range(end)] for index, end in enumerate(ends)]
