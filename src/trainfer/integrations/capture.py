"""``trainfer.capture``: watch whatever computes, a module of this process or a vLLM engine, and write a dump.

Takes the model and settings; gives a context manager: of ``check.probe.capture`` for an ``nn.Module``, of
``integrations.vllm.capture`` for a ``vllm.LLM``. vLLM itself is not imported here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from trainfer.check.probe.calls import RowSource
from trainfer.check.probe.capture import Capture
from trainfer.check.probe.capture import capture as capture_module
from trainfer.errors import CaptureError
from trainfer.integrations.vllm.capture import VllmCapture
from trainfer.integrations.vllm.settings import VllmCaptureSettings

VLLM_CLASSES = ("LLM", "LLMEngine")


def is_vllm(model: object) -> bool:
    """True for a ``vllm.LLM`` or its engine."""
    return any(
        kind.__module__.partition(".")[0] == "vllm" and kind.__name__ in VLLM_CLASSES
        for kind in type(model).__mro__
    )


def capture(  # noqa: D417 (the rest are those of the function that it calls)
    model: object,
    path: str | Path,
    *,
    side: str,
    pass_name: str | None = None,
    weights_version: int | None = None,
    level: str = "L0",
    task: str = "tensor",
    backward: bool = False,
    modules: Sequence[str] | None = None,
    steps: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    token_range: Sequence[int] | None = None,
    prompts_only: bool = False,
    rows: RowSource = None,
    weights: str = "fingerprint",
    max_bytes: int | None = None,
) -> Capture | VllmCapture:
    """Capture what a model computes; use it in a ``with`` statement.

    For a module all arguments are those of ``trainfer.check.probe.capture.capture``. A vLLM engine tells its passes and
    rows itself, has no backward pass, and is watched at its modules (``level="L0"``).

    Args:
        model: An ``nn.Module``, or a ``vllm.LLM``.
        path: Folder of the dump, not used before; ``{run_id}`` in it becomes a fresh run id.
        side: ``rollout`` or ``train``.
        weights_version: Optimizer steps behind the weights at the start; None counts from 0.
        task: ``tensor``, ``statistics`` or ``sketch``.
        modules: Names or patterns; None for all. vLLM's names: ``*.qkv_proj``.
        steps: Steps to keep, as counted by ``step()``; None for all.
        token_range: First position and the one after the last.
        max_bytes: Stop keeping values after so many bytes (of each vLLM worker).

    Raises:
        CaptureError: an argument cannot be.
    """
    if isinstance(model, nn.Module):
        return capture_module(
            model, path, side=side, pass_name=pass_name, weights_version=weights_version, level=level, task=task,
            backward=backward, modules=modules, steps=steps, ranks=ranks, token_range=token_range,
            prompts_only=prompts_only, rows=rows, weights=weights, max_bytes=max_bytes,
        )  # fmt: skip
    _refuse_for_vllm(
        model, side=side, pass_name=pass_name, level=level, backward=backward, ranks=ranks, rows=rows,
        weights=weights,
    )  # fmt: skip
    settings = VllmCaptureSettings(
        path=str(path),
        task=task,
        modules=None if modules is None else tuple(modules),
        steps=None if steps is None else tuple(steps),
        token_range=None if token_range is None else (token_range[0], token_range[1]),
        prompts_only=prompts_only,
        max_bytes=max_bytes,
        weights_version=weights_version,
    )
    return VllmCapture(model, settings)


ENGINE_KNOWS: Mapping[str, object] = {
    "side": "rollout",
    "pass_name": None,
    "level": "L0",
    "backward": False,
    "ranks": None,
    "rows": None,
    "weights": "fingerprint",
}
"""Arguments that have a meaning for a module only, with the value that they may have for an engine."""


def _refuse_for_vllm(model: object, **asked: object) -> None:
    if not is_vllm(model):
        raise CaptureError(
            f"a {type(model).__name__} cannot be captured; hand over an nn.Module or a vllm.LLM"
        )
    for name, value in asked.items():
        if value != ENGINE_KNOWS[name]:
            raise CaptureError(
                f"{name}={value!r} has no meaning for a vLLM engine; leave it at {ENGINE_KNOWS[name]!r}"
            )
