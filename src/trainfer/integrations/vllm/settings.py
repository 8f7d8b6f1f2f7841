"""What a capture inside vLLM is asked to do; plain values that cross a process as JSON. No torch, no vLLM.

``TRAINFER_CAPTURE`` holds it for processes that nobody can call, a verl rollout server's say.
"""

import msgspec

from trainfer.errors import CaptureError

VARIABLE = "TRAINFER_CAPTURE"
"""JSON of ``VllmCaptureSettings``; unset or empty: nothing is captured."""
REPLICA_VARIABLE = "TRAINFER_CAPTURE_REPLICA"
"""Which of ``replicas`` engines this process belongs to, from 0."""


class VllmCaptureSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Example: ``{"path": "dumps/rollout", "steps": [0, 1], "advance": "weights"}``."""

    path: str
    """Folder of the dump; one rank of it for each worker."""
    task: str = "tensor"
    modules: tuple[str, ...] | None = None
    steps: tuple[int, ...] | None = None
    token_range: tuple[int, int] | None = None
    prompts_only: bool = False
    max_bytes: int | None = None
    """Of one worker."""
    weights_version: int | None = None
    """Optimizer steps behind the weights when the capture begins; None counts from 0."""
    advance: str = "call"
    """What begins the next step: ``call``, somebody says so; ``weights``, the first forward on other weights."""
    record: bool = True
    """Write each request's tokens and log-probs, too; False where the caller does."""
    replicas: int = 1
    """Engines that share the folder."""
    run_id: str | None = None
    config: dict[str, object] = {}
    """The program's configuration, for the manifest."""
    weights_from: str = "trainfer.engines.vllm.effective.pieces"
    """Function that says what a vLLM model computes with; by name, since adapters do not import one another."""

    def encode(self) -> str:
        """As JSON."""
        return msgspec.json.encode(self).decode()


def decode_settings(text: str) -> VllmCaptureSettings:
    """From JSON.

    Raises:
        CaptureError: it is none of ours.
    """
    try:
        settings = msgspec.json.decode(text, type=VllmCaptureSettings)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CaptureError(f"{VARIABLE} does not hold the settings of a capture: {error}") from error
    if settings.advance not in ("call", "weights"):
        raise CaptureError(f"{VARIABLE} has advance={settings.advance!r}; use 'call' or 'weights'")
    if settings.replicas < 1:
        raise CaptureError(f"{VARIABLE} has replicas={settings.replicas}; it counts engines, from 1 on")
    return settings
