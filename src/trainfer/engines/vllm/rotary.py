"""Does the engine turn queries and keys by the angles of Transformers' ``inv_freq`` buffer?

Takes the buffer that was sent; compares it with every table of cosines and sines that the engine's layers
read. vLLM keeps no inv_freq: the table at position 1 holds it, and every other position must follow.
"""

import torch
from torch import Tensor, nn

_SLACK = 2.0**-22
"""Relative error of an angle: inv_freq rounded once more, and the product with the position."""


def rotary_mismatch(model: nn.Module, inv_freq: Tensor) -> str | None:
    """None where all tables agree with ``inv_freq``, else the first that does not."""
    tables = [
        (name, buffer) for name, buffer in model.named_buffers() if name.rpartition(".")[2] == "cos_sin_cache"
    ]
    if not tables:
        return "the engine has no table of rotary angles"
    for name, table in tables:
        worst = _worst(table.detach().float().cpu(), inv_freq.float().cpu(), table.dtype)
        if worst is not None:
            return f"{name} {worst}"
    return None


def _worst(table_TK: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> str | None:
    """Axes: T positions, K rotated channels (cosines, then sines)."""
    if table_TK.shape[1] != 2 * inv_freq.numel():
        return f"rotates {table_TK.shape[1]} channels, inv_freq {2 * inv_freq.numel()}"
    scale = table_TK[0, 0]  # cos 0, times the factor that some kinds of scaling apply to queries and keys
    angles = torch.outer(torch.arange(table_TK.shape[0], dtype=torch.float32), inv_freq)
    expected_TK = torch.cat((angles.cos(), angles.sin()), dim=-1) * scale
    allowed_TK = (torch.finfo(dtype).eps + angles.repeat(1, 2) * _SLACK) * scale.abs().clamp(min=1.0)
    excess = (table_TK - expected_TK).abs() - allowed_TK
    if scale <= 0 or bool((excess > 0).any()) or bool(excess.isnan().any()):
        position = int((excess > 0).any(dim=1).int().argmax())
        return f"differs from inv_freq from position {position} on"
    return None
