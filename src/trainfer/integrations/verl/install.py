"""Hooks this process: every function that the table of the installed verl names, once its module has been imported.

Takes the settings in the environment; changes classes of verl in this process. It is idempotent, and nothing that goes wrong in
it stops the run: it is told in the journal instead.
"""

import importlib
import importlib.metadata
import sys
from types import ModuleType

from trainfer.errors import CaptureError
from trainfer.integrations.verl.after_import import watch
from trainfer.integrations.verl.journal import Journal
from trainfer.integrations.verl.points import Point, Table, table_for
from trainfer.integrations.verl.settings import AttachSettings, from_environment
from trainfer.integrations.verl.wrapping import Advice, wrap

_MARK = "_trainfer_advice"


class Installer:
    """Hooks functions as their modules come."""

    def __init__(self, table: Table, journal: Journal) -> None:
        self._journal = journal
        self._points: dict[str, list[Point]] = {}
        for point in table.points:
            self._points.setdefault(point.module, []).append(point)

    @property
    def modules(self) -> frozenset[str]:
        """Modules that are waited for."""
        return frozenset(self._points)

    def hook(self, module: ModuleType) -> None:
        """Hook everything of one module; never raises."""
        for point in self._points[module.__name__]:
            try:
                self._hook(module, point)
            except Exception as error:  # noqa: BLE001 (a probe never stops the run)
                self._journal.problem(
                    f"{point.module}.{point.name} cannot be hooked: {type(error).__name__}: {error}"
                )

    def _hook(self, module: ModuleType, point: Point) -> None:
        owner_name, _, name = point.name.rpartition(".")
        owner = getattr(module, owner_name, None) if owner_name else module
        function = vars(owner).get(name) if isinstance(owner, type | ModuleType) else None
        label = f"{point.module}.{point.name}"
        if not callable(function) or isinstance(function, type):
            if point.required:
                self._journal.missing(
                    f"{label} is not there, or is no plain function: {point.what} is not captured"
                )
            return
        if getattr(function, _MARK, None) == point.advice:
            return
        wrapped = wrap(function, _advice(point.advice), self._journal.problem)
        setattr(wrapped, _MARK, point.advice)
        setattr(owner, name, wrapped)
        self._journal.hooked(label)


def _advice(name: str) -> Advice:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


_installed: list[Installer] = []


def install() -> None:
    """Hook this process, once. Without settings in the environment nothing happens."""
    if _installed:
        return
    try:
        settings = from_environment()
    except CaptureError as error:
        print(f"trainfer attach: {error}", file=sys.stderr)  # noqa: T201 (verl hides exceptions of plugins)
        return
    if settings is None:
        return
    installer = _installer(settings)
    if installer is not None:
        _installed.append(installer)
        watch(installer.modules, installer.hook)


def _installer(settings: AttachSettings) -> Installer | None:
    journal = Journal(settings)
    found = importlib.metadata.version("verl")
    table = table_for(settings.verl)
    if table is None or found != settings.verl:
        journal.problem(
            f"this process runs verl {found}, the run was attached for {settings.verl}: nothing is hooked in it"
        )
        return None
    return Installer(table, journal)
