import pytest
from worker_cases import sampled

from trainfer.train.metrics import Nobody, StageClock, batch_metrics, timing_metrics, validation_metrics
from trainfer.train.update.batch import training_sequences

SEQUENCES = [
    sampled(prompt_ids=(5, 6, 7), response_ids=(1,)),
    sampled(prompt_ids=(5,), response_ids=(1, 2, 3, 4, 5, 6, 7, 8)),
]


def test_a_batch_by_hand():
    training = training_sequences(
        SEQUENCES, [2.0, -1.0], old_logprobs=None, ref_logprobs=None, rollout_weights=None
    )
    metrics = batch_metrics(SEQUENCES, scores=[1.0, 0.0], rewards=[0.9, -0.1], training=training)
    assert metrics == pytest.approx(
        {
            "critic/score/mean": 0.5,
            "critic/score/max": 1.0,
            "critic/score/min": 0.0,
            "critic/rewards/mean": 0.4,
            "critic/rewards/max": 0.9,
            "critic/rewards/min": -0.1,
            "critic/advantages/mean": (2.0 - 8.0) / 9,  # over tokens, not sequences
            "critic/advantages/max": 2.0,
            "critic/advantages/min": -1.0,
            "critic/returns/mean": (2.0 - 8.0) / 9,
            "critic/returns/max": 2.0,
            "critic/returns/min": -1.0,
            "response_length/mean": 4.5,
            "response_length/max": 8.0,
            "response_length/min": 1.0,
            "response_length/clip_ratio": 0.5,  # the limit is 8 new tokens
            "prompt_length/mean": 2.0,
            "prompt_length/max": 3.0,
            "prompt_length/min": 1.0,
            "global_seqlen/mean": 6.5,
            "global_seqlen/max": 9.0,
            "global_seqlen/min": 4.0,
            "global_seqlen/minmax_diff": 5.0,
        }
    )


def test_throughput_is_tokens_per_second_and_rank():
    metrics = timing_metrics({"gen": 1.0, "step": 4.0}, total_tokens=200, num_ranks=2)
    assert metrics["timing_s/gen"] == 1.0
    assert metrics["perf/throughput"] == 25.0
    assert metrics["perf/total_num_tokens"] == 200.0


def test_validation_is_the_mean_score_by_data_source():
    assert validation_metrics(SEQUENCES, [1.0, 0.5], samples_per_prompt=2) == {
        "val-core/trainfer/letters/reward/mean@2": 0.75
    }


def test_a_stage_that_comes_twice_adds_up_and_the_watcher_hears_of_each():
    heard = []

    class Watcher(Nobody):
        def stage(self, name):
            heard.append(name)

    clock = StageClock(Watcher())
    for _ in range(2):
        with clock.stage("gen"):
            pass
    seconds = clock.seconds()
    assert heard == ["gen", "gen"]
    assert 0 <= seconds["gen"] <= seconds["step"]
