"""Runs advice around a function, whether it is plain, a coroutine or an asynchronous generator.

Advice is a generator function: what stands before its ``yield`` runs before the call, the value of ``yield`` is the result, what
follows runs after it. It may change ``call.args`` and ``call.kwargs``, or ``call.skip(answer)``. Whatever goes wrong in advice is
told and costs the capture, never the run.
"""

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from typing import Any

Advice = Callable[["Call"], Generator[None, Any, None]]
Tell = Callable[[str], None]


@dataclass(slots=True)
class Call:
    """One call of a hooked function."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    skipped: bool = False
    answer: Any = None

    @property
    def owner(self) -> Any:
        """The object whose method is called."""
        return self.args[0]

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name, however it was passed; ``default`` where it was left out."""
        if name in self.kwargs:
            return self.kwargs[name]
        names = list(inspect.signature(self.function).parameters)
        place = names.index(name) if name in names else len(self.args)
        return self.args[place] if place < len(self.args) else default

    def skip(self, answer: Any = None) -> None:
        """Do not call the function; its caller gets ``answer``."""
        self.skipped, self.answer = True, answer


class _Running:
    """Advice that has started; failures end it and are told."""

    def __init__(self, advice: Advice, call: Call, tell: Tell) -> None:
        self._tell = tell
        self._name = call.function.__qualname__
        self._generator: Generator[None, Any, None] | None = None
        original = call.args, dict(call.kwargs)
        try:
            generator = advice(call)
            next(generator)
            self._generator = generator
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001 (a probe never stops the run)
            call.args, call.kwargs = original
            call.skipped = False
            self._failed(error)

    def finish(self, result: Any) -> None:
        """The function has returned."""
        generator, self._generator = self._generator, None
        if generator is None:
            return
        try:
            generator.send(result)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 (a probe never stops the run)
            self._failed(error)
        else:
            generator.close()

    def raised(self, error: BaseException) -> None:
        """The function has raised; advice may clean up (``try``, ``finally``) and cannot hide it."""
        generator, self._generator = self._generator, None
        if generator is None:
            return
        try:
            generator.throw(error)
        except BaseException as other:  # noqa: BLE001 (a probe never stops the run)
            if other is not error and not isinstance(other, StopIteration):
                self._failed(other)

    def _failed(self, error: BaseException) -> None:
        self._tell(f"{self._name}: {type(error).__name__}: {error}")


def wrap(function: Callable[..., Any], advice: Advice, tell: Tell) -> Callable[..., Any]:
    """A function that runs ``advice`` around ``function``, with all its attributes (verl's dispatch marks among them)."""
    if inspect.isasyncgenfunction(function):
        return _wrap_async_generator(function, advice, tell)
    if inspect.iscoroutinefunction(function):
        return _wrap_coroutine(function, advice, tell)
    if inspect.isgeneratorfunction(function):
        raise TypeError(f"{function.__qualname__} is a generator; advice around one is not written")

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        call = Call(function, args, kwargs)
        running = _Running(advice, call, tell)
        try:
            result = call.answer if call.skipped else function(*call.args, **call.kwargs)
        except BaseException as error:
            running.raised(error)
            raise
        running.finish(result)
        return result

    return plain


def _wrap_coroutine(function: Callable[..., Any], advice: Advice, tell: Tell) -> Callable[..., Any]:
    @functools.wraps(function)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        call = Call(function, args, kwargs)
        running = _Running(advice, call, tell)
        try:
            result = call.answer if call.skipped else await function(*call.args, **call.kwargs)
        except BaseException as error:
            running.raised(error)
            raise
        running.finish(result)
        return result

    return coroutine


def _wrap_async_generator(function: Callable[..., Any], advice: Advice, tell: Tell) -> Callable[..., Any]:
    """The result that advice sees is the last item."""

    @functools.wraps(function)
    async def generator(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        call = Call(function, args, kwargs)
        running = _Running(advice, call, tell)
        last = None
        try:
            async for item in function(*call.args, **call.kwargs):
                last = item
                yield item
        except BaseException as error:
            running.raised(error)
            raise
        running.finish(last)

    return generator
