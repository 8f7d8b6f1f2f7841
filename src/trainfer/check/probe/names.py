"""Module names without the wrappers that trainers put around a model.

Takes an ``nn.Module``; gives its modules under the names that the bare Transformers model has. FSDP1, DDP,
``torch.compile``, activation checkpointing and PEFT's outer model are seen through; FSDP2 renames nothing.
"""
# pyright: standard
# (torch's own types are partial)

from torch import nn

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"})


def bare_name(name: str) -> str:
    """``_orig_mod.model.layers.0._fsdp_wrapped_module.mlp`` is ``model.layers.0.mlp``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Every module once, under its first bare name, in the order of definition; the innermost where wrappers share one."""
    prefix = _outer_prefix(root)
    modules: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        modules[_strip(bare_name(name), prefix)] = module
    return modules


def aliases(root: nn.Module) -> dict[str, tuple[str, ...]]:
    """Further names of modules that the model holds in several places, by first name."""
    prefix = _outer_prefix(root)
    names: dict[int, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(_strip(bare_name(name), prefix))
    return {found[0]: tuple(dict.fromkeys(found[1:])) for found in names.values() if len(set(found)) > 1}


def named_tensors(root: nn.Module) -> dict[str, tuple[str, str]]:
    """Module and local name of every parameter and buffer, by the full bare name; tied ones under each name."""
    prefix = _outer_prefix(root)
    found: dict[str, tuple[str, str]] = {}
    pairs = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    for name, _ in pairs:
        full = _strip(bare_name(name), prefix)
        module, _, local = full.rpartition(".")
        found[name] = (module, local)
    return found


def inner_name(root: nn.Module, name: str) -> str:
    """The name that the bare model has for something that ``root`` names so."""
    return _strip(bare_name(name), _outer_prefix(root))


def _outer_prefix(root: nn.Module) -> str:
    """What DDP (``module``) and PEFT (``base_model.model``) put before every name of the model inside."""
    prefix = ""
    module = root
    while True:
        children = dict(module.named_children())
        if set(children) == {"module"}:
            step, module = "module", children["module"]
        elif set(children) == {"base_model"} and set(dict(children["base_model"].named_children())) == {
            "model"
        }:
            step, module = "base_model.model", dict(children["base_model"].named_children())["model"]
        elif len(children) == 1 and next(iter(children)) in _WRAPPERS:
            module = next(iter(children.values()))
            continue
        else:
            return prefix
        prefix = f"{prefix}.{step}" if prefix else step


def _strip(name: str, prefix: str) -> str:
    """Remove the outer prefix; the wrappers themselves are the root."""
    if not prefix:
        return name
    if prefix == name or prefix.startswith(f"{name}.") or not name:
        return ""
    return name.removeprefix(f"{prefix}.")
