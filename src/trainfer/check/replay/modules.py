"""What kind of operator a module is, told by its class and parts.

Takes a module; gives a word for reports and the facts that a noise floor depends on.
"""

from torch import nn

ACTIVATIONS = ("silu", "gelu", "relu", "tanh", "sigmoid", "activation", "swish", "mish")


def operator_of(module: nn.Module, name: str) -> str:
    """``linear``, ``head``, ``norm``, ``rope``, ``embedding``, ``activation``, ``dropout``, ``attention``, ``moe``,
    ``mlp``, ``layer``, ``model`` or ``other``.
    """
    kind = type(module).__name__.lower()
    if name.rpartition(".")[2] in ("lm_head", "output_layer", "embed_out"):
        return "head"
    if isinstance(module, nn.Linear) or kind == "conv1d":
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    for word, operator in (("norm", "norm"), ("rotary", "rope"), ("dropout", "dropout")):
        if word in kind and not any(module.children()):
            return operator
    if is_attention(module):
        return "attention"
    if not any(module.children()):
        return "activation" if any(word in kind for word in ACTIVATIONS) else _by_kind(kind, "other")
    if any(is_attention(child) for child in module.children()):
        return "layer"
    if any(is_attention(part) for part in module.modules()):
        return "model"
    return _by_kind(kind, "mlp")


def _by_kind(kind: str, otherwise: str) -> str:
    return "moe" if any(word in kind for word in ("moe", "expert", "router")) else otherwise


def is_attention(module: nn.Module) -> bool:
    """A module in which rows of a sequence meet."""
    return "attention" in type(module).__name__.lower() and any(True for _ in module.children())


def window_of(module: nn.Module) -> int | None:
    """Keys that a query of an attention module sees, itself included; None for all before it."""
    window = vars(module).get("sliding_window")
    if window is None and "layer_type" not in vars(module):
        window = getattr(vars(module).get("config"), "sliding_window", None)
        kinds = getattr(vars(module).get("config"), "layer_types", None)
        place = vars(module).get("layer_idx")
        if kinds and isinstance(place, int) and kinds[place] != "sliding_attention":
            window = None
    return window if isinstance(window, int) and not isinstance(window, bool) and window > 0 else None


def contraction_of(module: nn.Module, operator: str, width_in: int) -> int:
    """Length of the sums behind one output element."""
    if operator in ("linear", "head"):
        return width_in
    if operator == "norm":
        weight = dict(module.named_parameters()).get("weight")
        return width_in if weight is None else weight.numel()
    head = vars(module).get("head_dim")
    return head if operator == "attention" and isinstance(head, int) else 1
