"""`accelerate()`: existing Dask code multiplies its matrices with multimm, inside a `with`.

Every way from Dask code to a matrix product ends in one of three functions, and these are wrapped:

    x @ y, np.matmul(x, y)         -> dask.array.routines.matmul, looked up at each call
    da.matmul(x, y)                -> dask.array.matmul
    da.dot(x, y), np.dot(x, y)     -> dask.array.dot (da.vdot: dask.array.routines.dot)
    x.dot(y)                       -> dask.array.Array.dot

The wrappers are the same for everybody and stay while anybody needs them (a count under a lock);
a context variable decides at each call who asked for multimm. So other threads and asynchronous
tasks get Dask's own product even while the wrappers are in place.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
import types
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import dask.array as da
from dask.array import routines
from dask.array.core import Array as ClassicArray

from multimm.api import matmul
from multimm.errors import ArrayTypeError, DTypeError, OptionError
from multimm.operands import as_array, is_dask

logger = logging.getLogger(__name__)

Function = Callable[..., Any]

#: Where products are looked up: owner, attribute.
ENTRIES: tuple[tuple[Any, str], ...] = (
    (routines, "matmul"),
    (routines, "dot"),
    (da, "matmul"),
    (da, "dot"),
    (da.Array, "dot"),
)


@dataclass
class Session:
    """One `with accelerate()`; ended sessions linger in contexts that were copied from it."""

    outer: Session | None
    active: bool = True

    @classmethod
    def begin(cls) -> Session:
        """A session inside of the one that the caller is in."""
        if da.Array is not ClassicArray:
            raise ArrayTypeError(
                "accelerate() with Dask's array query planning on: its arrays have no matrix "
                "product; set `array.query-planning` to False before importing dask.array"
            )
        PATCH.acquire()
        return cls(SESSION.get())

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Session]:
        """A session for one call of a function, all of whose steps are inside."""
        session = cls.begin()
        try:
            yield session
        finally:
            session.close()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Run a step of a function in this session."""
        token = SESSION.set(self)
        try:
            yield
        finally:
            SESSION.reset(token)

    def close(self) -> None:
        """End it, wherever it still lingers."""
        self.active = False
        PATCH.release()


@dataclass
class Patch:
    """The wrappers, counted."""

    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    originals: list[tuple[Any, str, Any, Any]] = field(default_factory=list)

    def acquire(self) -> None:
        """Add a user; the first one puts the wrappers in place."""
        with self.lock:
            self.users += 1
            if self.users == 1:
                self._install()

    def release(self) -> None:
        """Drop a user; the last one takes the wrappers away."""
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self._restore()

    def _install(self) -> None:
        # One wrapper for each function, under however many names: pickle finds it by its name.
        found = {getattr(owner, name) for owner, name in ENTRIES}
        wrappers = {original: _wrap(original) for original in found}
        for owner, name in ENTRIES:
            original = getattr(owner, name)
            wrapper = wrappers[original]
            setattr(owner, name, wrapper)
            self.originals.append((owner, name, original, wrapper))

    def _restore(self) -> None:
        for owner, name, original, wrapper in self.originals:
            # Whoever patched on top of us keeps that; our wrapper below does nothing any more.
            if getattr(owner, name) is wrapper:
                setattr(owner, name, original)
        self.originals.clear()


PATCH = Patch()
SESSION: ContextVar[Session | None] = ContextVar("multimm_accelerate", default=None)


class Acceleration(AbstractContextManager[None]):
    """What `accelerate()` returns: a context manager, and a decorator."""

    def __init__(self) -> None:
        self._entered: list[tuple[Session, Token[Session | None]]] = []

    def __enter__(self) -> None:
        session = Session.begin()
        self._entered.append((session, SESSION.set(session)))

    def __exit__(self, *_: object) -> None:
        session, token = self._entered.pop()
        try:
            SESSION.reset(token)
        except ValueError:
            # A generator that is closed from another context than it ran in.
            logger.debug("accelerate() ended in another context than it began in")
        session.close()

    def __call__(self, func: Any) -> Any:
        """The function, each of whose calls is inside."""
        return decorated(func)


def accelerate() -> Acceleration:
    """Let matrix products of Dask arrays go through `multimm.matmul` inside a ``with``.

    That holds for ``x @ y`` with a Dask array on either side, ``da.matmul``, ``da.dot``,
    ``x.dot(y)``, ``np.matmul`` and ``np.dot`` of a Dask array. Results are lazy as always; what
    counts is where a product is written, not where it is computed. Blocks and devices are those
    that `multimm.matmul` takes.

    Only the thread or asynchronous task that entered is affected, with the tasks it creates
    inside. Sessions nest, and Dask is as before when the last one has ended, by an exception
    too.

    Also a decorator, ``@multimm.accelerate()``, of functions, methods, coroutine functions and
    generators: of a generator that is suspended, the caller is not affected. (He is by a ``with``
    inside of one: Python has one context for both.)

    Returns
    -------
    context manager and decorator

    Raises
    ------
    ArrayTypeError
        On entering, with Dask's array query planning switched on.
    OptionError
        As a decorator of a class.

    Notes
    -----
    What multimm does not multiply goes to Dask as before, with a line in the debug log: object
    and string dtypes, sparse and masked blocks, unknown chunk sizes, keyword arguments such as
    ``out=``, and `dot` of scalars or of more than two dimensions, which is not a matrix product.
    Wrong shapes raise at the call.

    Results have NumPy's dtype, as `multimm.matmul` says: of int8 int8, which may wrap around, and
    of bool bool. Dask's own products of bools and short integers are in 64 bits, where one block's
    may have wrapped around before. Where wide ones are meant, call
    ``multimm.matmul(x, y, dtype="int64")``; a warning says once that sums can leave int8.

    A function imported before, as in ``from dask.array import matmul``, is Dask's own object and
    cannot be redirected; ``da.matmul`` and ``@`` can.

    ``da.tensordot`` and ``da.einsum`` stay Dask's, and so do the products of xarray, which end in
    these: ``x @ y``, ``x.dot(y)`` and ``xr.dot(x, y)``. Of two DataArrays, multiply the arrays in
    them, ``multimm.matmul(x.data, y.data)``, or keep the names of the dimensions:
    ``xr.apply_ufunc(multimm.matmul, x, y, input_core_dims=[["i", "k"], ["k", "j"]],
    output_core_dims=[["i", "j"]], dask="allowed")``.

    Examples
    --------
    >>> import dask.array as da, multimm
    >>> x = da.ones((4, 3), chunks=2)
    >>> with multimm.accelerate():
    ...     y = x @ x.T
    >>> y.name.startswith("multimm")
    True
    """
    return Acceleration()


def decorated(func: Any) -> Any:
    """A function that does the same as another one, in a session of its own for each call.

    A generator or a coroutine runs in steps, and between two of them its caller does. So the
    session is entered for each step, and stays open until the last one.

    Raises
    ------
    OptionError
        For a class, and for what cannot be called.
    """
    if isinstance(func, classmethod | staticmethod):
        return type(func)(decorated(func.__func__))
    if isinstance(func, type) or not callable(func):
        name = "multimm.accelerate()"
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
    return wraps(func)(made(func))


def _function(func: Function) -> Function:
    """What it returns runs inside, too, if it runs in steps."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with Session.opened() as session, session.inside():
            made = func(*args, **kwargs)
        kinds = (
            (inspect.iscoroutine, _coroutine_function),
            (inspect.isasyncgen, _async_generator_function),
            (inspect.isgenerator, _generator_function),
        )
        return next((make(lambda: made)() for is_one, make in kinds if is_one(made)), made)

    return wrapper


def _coroutine_function(func: Function) -> Function:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with Session.opened() as session:
            return await _awaited(func(*args, **kwargs), session)

    return wrapper


def _generator_function(func: Function) -> Function:
    """The session of each generator begins with its first step."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with Session.opened() as session:
            return (yield from _steps(func(*args, **kwargs), session))

    return wrapper


def _async_generator_function(func: Function) -> Function:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with Session.opened() as session:
            inner = func(*args, **kwargs)
            step = inner.asend(None)
            while True:
                try:
                    out = await _awaited(step, session)
                except StopAsyncIteration:
                    return
                try:
                    step = inner.asend((yield out))
                except GeneratorExit:
                    await _awaited(inner.aclose(), session)
                    raise
                except BaseException as error:  # thrown in: the function may catch it
                    step = inner.athrow(error)

    return wrapper


def _steps(inner: Any, session: Session) -> Generator[Any, Any, Any]:
    """What a generator or a coroutine yields, takes and returns, each step inside."""
    step = partial(inner.send, None)
    while True:
        try:
            with session.inside():
                out = step()
        except StopIteration as stop:
            return stop.value
        try:
            step = partial(inner.send, (yield out))
        except GeneratorExit:
            with session.inside():
                inner.close()
            raise
        except BaseException as error:  # thrown in: the function may catch it
            step = partial(inner.throw, error)


@types.coroutine
def _awaited(inner: Any, session: Session) -> Generator[Any, Any, Any]:
    """The result of a coroutine, or of a step of an asynchronous generator."""
    return (yield from _steps(inner, session))


def accelerated() -> bool:
    """Whether the caller is inside `accelerate()`, and not inside multimm's own work."""
    session = SESSION.get()
    while session is not None and not session.active:
        session = session.outer
    return session is not None


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, or multimm where the caller asked for it and it computes the same."""

    @wraps(original)
    def product(*args: Any, **kwargs: Any) -> Any:
        # All else is a function of this module: what travels to a worker holds no context.
        return _call(original, args, kwargs)

    return product


def _call(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not accelerated():
        return original(*args, **kwargs)
    # Note: multimm's own code, and Dask's fallback, must reach Dask's own functions.
    token = SESSION.set(None)
    try:
        try:
            reason = _obstacle(original.__name__, args, kwargs)
            if not reason:
                return matmul(*args, chunks="operands")
        except (DTypeError, ArrayTypeError) as error:
            reason = str(error)
        logger.debug("left to Dask: %s", reason)
        return original(*args, **kwargs)
    finally:
        SESSION.reset(token)


def _obstacle(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why this call of `name` is not one of `multimm.matmul`; empty if it is."""
    if kwargs or len(args) != 2:
        return f"{name} with other arguments than two operands by position"
    if not any(isinstance(x, da.Array) for x in args):
        return f"{name} without a Dask array"
    # Of lists, h5py datasets and the like NumPy would say the shape once it has read them.
    shapes = [
        as_array(x, "an operand", lazily=True).shape if not is_dask(x) else x.shape for x in args
    ]
    if any(math.isnan(size) for shape in shapes for size in shape):
        return "unknown chunk sizes"
    ndims = [*map(len, shapes)]
    if 0 in ndims or (name == "dot" and max(ndims) > 2):
        return f"{name} of {ndims[0]}-D and {ndims[1]}-D operands is not a matrix product"
    return ""
