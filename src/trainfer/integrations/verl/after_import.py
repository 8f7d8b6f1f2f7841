"""Calls back when a module has been imported, without importing it.

verl loads plugins while it is half imported itself, so a hook cannot import what it hooks: it waits. A finder at the head of
``sys.meta_path`` lets the other finders find the module and runs the callback behind its execution.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]


class AfterImport(MetaPathFinder):
    """Finds nothing itself; watches for the named modules."""

    def __init__(self, names: frozenset[str], callback: Callback) -> None:
        self._names = names
        self._callback = callback
        self._looking = set[str]()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, with a loader that calls back.

        None while it is looking already: another finder that asks all finders, too, would ask it back for ever.
        """
        if fullname not in self._names or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = self._of_the_others(fullname, path, target)
        finally:
            self._looking.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self._callback)
        return spec

    def _of_the_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None:
                return spec
        return None


class _CallingLoader(Loader):
    """Another loader, with a callback behind ``exec_module``; everything else is the other's."""

    def __init__(self, loader: Loader, callback: Callback) -> None:
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the other loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the other loader, which is then the module's loader again; then the callback."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._callback(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def watch(names: frozenset[str], callback: Callback) -> None:
    """Call back for each of the modules once it has been imported; at once for those that already are."""
    sys.meta_path.insert(0, AfterImport(names, callback))
    for name in sorted(names):
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            callback(module)
