"""Functions that run inside something, whatever kind of function they are.

A generator or a coroutine runs in steps, and between two of them its caller does. So what it is
to run inside is entered for each step, and stays open until the last one.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, Protocol

from multimm.errors import OptionError


class Span(Protocol):
    """What functions run inside, from a first step to a last one."""

    def inside(self) -> AbstractContextManager[Any]:
        """Enter it for a step."""

    def close(self) -> None:
        """End it."""


Begin = Callable[[], Span]
Function = Callable[..., Any]


def decorated(func: Any, begin: Begin, name: str) -> Any:
    """A function that does the same as another one, inside a span of its own for each call.

    Parameters
    ----------
    func : callable, classmethod or staticmethod
        A coroutine function, generator or asynchronous generator stays one.
    begin : callable
        Begins a span.
    name : str
        Of the decorator, for messages.

    Raises
    ------
    OptionError
        For a class, and for what cannot be called.
    """
    if isinstance(func, classmethod | staticmethod):
        return type(func)(decorated(func.__func__, begin, name))
    if isinstance(func, type) or not callable(func):
        raise OptionError(
            f"@{name} decorates functions and methods, got {func!r}: decorate the methods of a "
            f"class, or use `with {name}:` inside"
        )
    kinds = (
        (inspect.iscoroutinefunction, _coroutine_function),
        (inspect.isasyncgenfunction, _async_generator_function),
        (inspect.isgeneratorfunction, _generator_function),
    )
    made = next((make for is_one, make in kinds if is_one(func)), _function)
    return wraps(func)(made(func, begin))


def _function(func: Function, begin: Begin) -> Function:
    """What it returns runs inside, too, if it runs in steps."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        span = begin()
        try:
            with span.inside():
                made = func(*args, **kwargs)
        finally:
            span.close()
        if inspect.isgenerator(made):
            return _generator_function(lambda: made, begin)()
        if inspect.iscoroutine(made):
            return _coroutine_function(lambda: made, begin)()
        return (
            _async_generator_function(lambda: made, begin)() if inspect.isasyncgen(made) else made
        )

    return wrapper


def _coroutine_function(func: Function, begin: Begin) -> Function:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        span = begin()
        try:
            return await _awaited(func(*args, **kwargs), span)
        finally:
            span.close()

    return wrapper


def _generator_function(func: Function, begin: Begin) -> Function:
    """The span of each generator begins with its first step."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        span = begin()
        try:
            return (yield from _steps(func(*args, **kwargs), span))
        finally:
            span.close()

    return wrapper


def _async_generator_function(func: Function, begin: Begin) -> Function:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        span = begin()
        try:
            inner = func(*args, **kwargs)
            step = inner.asend(None)
            while True:
                try:
                    out = await _awaited(step, span)
                except StopAsyncIteration:
                    return
                try:
                    step = inner.asend((yield out))
                except GeneratorExit:
                    await _awaited(inner.aclose(), span)
                    raise
                except BaseException as error:  # thrown in: the function may catch it
                    step = inner.athrow(error)
        finally:
            span.close()

    return wrapper


def _steps(inner: Any, span: Span) -> Generator[Any, Any, Any]:
    """What a generator or a coroutine yields, takes and returns, each step inside a span."""
    step = partial(inner.send, None)
    while True:
        try:
            with span.inside():
                out = step()
        except StopIteration as stop:
            return stop.value
        try:
            step = partial(inner.send, (yield out))
        except GeneratorExit:
            with span.inside():
                inner.close()
            raise
        except BaseException as error:  # thrown in: the function may catch it
            step = partial(inner.throw, error)


@types.coroutine
def _awaited(inner: Any, span: Span) -> Generator[Any, Any, Any]:
    """The result of a coroutine, or of a step of an asynchronous generator."""
    return (yield from _steps(inner, span))
