"""Engine names to engines; each is imported only when it is asked for."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trainfer.engines.limits import EngineLimits
from trainfer.errors import EngineError

if TYPE_CHECKING:
    from torch import nn

    from trainfer.engines.scripted.engine import ScriptedAnswer
    from trainfer.engines.vllm.settings import VllmSettings
    from trainfer.train.rollout.engine import Engine
    from trainfer.types import GenerationRequest

ENGINE_NAMES = ("builtin", "hf", "scripted", "vllm")


def make_engine(
    name: str,
    *,
    model: "nn.Module | None" = None,
    answers: "Sequence[ScriptedAnswer] | Callable[[GenerationRequest], ScriptedAnswer] | None" = None,
    limits: EngineLimits | None = None,
    vllm: "VllmSettings | None" = None,
    weights_version: int = 0,
) -> "Engine":
    """Make an engine.

    Args:
        name: One of ``ENGINE_NAMES``.
        model: The causal LM that ``builtin`` and ``hf`` compute with, and write new weights into.
        answers: The script of ``scripted``.
        limits: None is ``EngineLimits()``; not read by ``vllm``.
        vllm: How ``vllm`` is started; it makes its own model from a folder.
        weights_version: Optimizer steps behind the model's weights.

    Raises:
        EngineError: Unknown or unavailable engine, or one without what it needs.
    """
    if name == "scripted":
        from trainfer.engines.scripted.engine import ScriptedEngine

        if answers is None:
            raise EngineError("the scripted engine needs answers; pass a list or a function of the request")
        return ScriptedEngine(answers, weights_version=weights_version)
    if name == "vllm":
        if vllm is None:
            raise EngineError("the vllm engine needs settings with a model folder; pass VllmSettings")
        from trainfer.engines.vllm.environment import installed_version, prepare_process, undisturbed

        installed_version()
        prepare_process(vllm.device)
        with undisturbed():
            from trainfer.engines.vllm.engine import VllmEngine

        return VllmEngine(vllm, weights_version=weights_version)
    if name not in ENGINE_NAMES:
        raise EngineError(
            f"no engine is called {name!r} (actor_rollout_ref.rollout.name); known are {', '.join(ENGINE_NAMES)}"
        )
    if model is None:
        raise EngineError(f"the {name} engine needs a model; pass the module that load_model gave")
    limits = limits if limits is not None else EngineLimits()
    if name == "hf":
        from trainfer.engines.hf.engine import HfEngine

        return HfEngine(model, limits=limits, weights_version=weights_version)
    from trainfer.engines.builtin.engine import BuiltinEngine
    from trainfer.exact import gpu

    if gpu.computes(next(model.parameters())):
        from trainfer.engines.builtin.gpu_engine import GpuEngine, suits

        if suits(model):
            return GpuEngine(model, limits=limits, weights_version=weights_version)
    return BuiltinEngine(model, limits=limits, weights_version=weights_version)
