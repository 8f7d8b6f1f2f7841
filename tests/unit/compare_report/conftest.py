"""Fixtures of the reports' tests."""

import pytest
from report_toy import HOSTILE, make_diagnosis

from trainfer.check.diagnose import Diagnosis


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    texts = {token: HOSTILE[token % len(HOSTILE)] for token in range(32)}
    folder = tmp_path_factory.mktemp("faulty")
    return make_diagnosis(folder, layers=3, length=24, fault="layers.1.mlp.2", texts=texts)


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    return make_diagnosis(tmp_path_factory.mktemp("clean"), layers=1, length=8, fault=None, texts={})
