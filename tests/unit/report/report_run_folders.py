"""Run folders for the tests of the report."""

import json

from trainfer.train.journal.metrics import MetricsLog


def metrics(step, total=100, **changed):
    values = {
        "critic/score/mean": step / total,
        "mismatch/logp_abs_diff_max": 0.0,
        "mismatch/bitwise_equal_fraction": 1.0,
        "mismatch/nonfinite_tokens": 0.0,
        "mismatch/tokens": 512.0,
        "weights/fingerprint_match": 1.0,
        "response_length/mean": 16.0,
        "perf/total_num_tokens": 640.0,
        "global_seqlen/mean": 20.0,  # 32 sequences, 512 response tokens
        "timing_s/step": 1.0,
        "timing_s/gen": 0.5,
        "timing_s/update_actor": 0.25,
    }
    return values | changed


def run_folder(tmp_path, lines):
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    log = MetricsLog(folder / "metrics.jsonl", resumed_step=0)
    for step, values in lines:
        log.append(step, values)
    log.close()
    (folder / "config.yaml").write_text("trainer: {project_name: p, experiment_name: <b>e</b>}\n")
    (folder / "plan.json").write_text('{"sequences_per_step": 32}')
    (folder / "rollouts").mkdir(exist_ok=True)
    return folder


def add_rollouts(folder, step, responses):
    with (folder / "rollouts" / f"{step}.jsonl").open("w") as file:
        for group, response in enumerate(responses):
            entry = {
                "group": group,
                "messages": [{"role": "user", "content": "2 + 2?"}],
                "response": response,
                "ground_truth": "4",
                "score": 1.0,
                "finish_reason": "stop",
            }
            file.write(json.dumps(entry) + "\n")
