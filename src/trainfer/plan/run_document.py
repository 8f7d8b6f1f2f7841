"""``plan.json`` of a run folder: the same document as ``trainfer plan --json``, and the step that runs."""

import json
import os
from dataclasses import asdict

from trainfer.config.settings import Settings
from trainfer.plan.analyse import analyse
from trainfer.plan.read import question_of_settings
from trainfer.plan.records import StepPlan
from trainfer.plan.to_json import plan_document


def run_document(settings: Settings, step: StepPlan) -> str:
    """The document under trainfer's rules, with the integers of the running step under ``step``."""
    plan = analyse(question_of_settings(settings, variables=dict(os.environ)), "trainfer")
    return json.dumps({**plan_document(plan), "step": asdict(step)}, indent=1, allow_nan=False, default=str)
