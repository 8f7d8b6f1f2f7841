import sys
from types import ModuleType

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainfer.errors import ConfigError
from trainfer.train.journal import loggers as loggers_module
from trainfer.train.journal.loggers import Loggers, RunNames, check_loggers, open_loggers


def names(folder, resumed_step=0):
    return RunNames(
        project="p", experiment="e", folder=folder, resumed_step=resumed_step, config={"lr": 1e-6}
    )


def test_an_unknown_logger_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'swanlab'.*tensorboard, wandb"):
        check_loggers(["console", "swanlab"])


def test_a_logger_that_is_not_installed_names_its_extra(monkeypatch):
    monkeypatch.setattr(loggers_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'trainfer\[wandb\]'"):
        check_loggers(["wandb"])


def test_tensorboard_gets_every_step_and_hides_the_steps_that_are_trained_again(tmp_path):
    first = open_loggers(["console", "tensorboard"], names(tmp_path))
    for step in (1, 2, 3):
        first.log(step, {"critic/score/mean": step / 10})
    first.close()
    again = open_loggers(["tensorboard"], names(tmp_path, resumed_step=1))
    again.log(2, {"critic/score/mean": 0.5})
    again.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = {event.step: event.value for event in events.Scalars("critic/score/mean")}
    assert values == {1: pytest.approx(0.1), 2: 0.5}


class Failing:
    def __init__(self):
        self.calls = 0

    def log(self, step, metrics):
        self.calls += 1
        raise RuntimeError("no network")

    def close(self):
        raise RuntimeError("still none")


def test_a_failing_logger_is_dropped_with_one_warning_and_the_others_go_on(caplog):
    seen = []

    class Kept:
        def log(self, step, metrics):
            seen.append(step)

        def close(self):
            pass

    failing = Failing()
    loggers = Loggers({"bad": failing, "good": Kept()})
    for step in (1, 2, 3):
        loggers.log(step, {"a": 1.0})
    loggers.close()
    assert failing.calls == 1
    assert seen == [1, 2, 3]
    assert len(caplog.records) == 1
    assert "bad failed at step 1 (RuntimeError: no network)" in caplog.text


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_wandb_and_trackio_get_name_config_and_steps(package, monkeypatch, tmp_path):
    """The packages' own interface: ``init(project=, name=, config=)`` gives a run with ``log`` and ``finish``."""
    calls = []

    class Run:
        def log(self, metrics, step):
            calls.append((step, metrics))

        def finish(self):
            calls.append("finish")

    module = ModuleType(package)
    module.init = lambda **arguments: calls.append(arguments) or Run()
    monkeypatch.setitem(sys.modules, package, module)
    monkeypatch.setattr(loggers_module.importlib.util, "find_spec", lambda name: object())
    loggers = open_loggers([package], names(tmp_path))
    loggers.log(4, {"a": 1.0})
    loggers.close()
    assert calls[0]["project"] == "p"
    assert calls[0]["name"] == "e"
    assert calls[0]["config"] == {"lr": 1e-6}
    assert calls[1:] == [(4, {"a": 1.0}), "finish"]


def test_a_logger_that_cannot_start_is_left_out(monkeypatch, tmp_path, caplog):
    def refuse(**arguments):
        raise OSError("no login")

    module = ModuleType("wandb")
    module.init = refuse
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(loggers_module.importlib.util, "find_spec", lambda name: object())
    open_loggers(["wandb"], names(tmp_path)).log(1, {"a": 1.0})
    assert "wandb cannot be started (no login)" in caplog.text
