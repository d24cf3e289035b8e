"""`accelerate()`: existing Dask code multiplies its matrices with multimm, inside a `with`.

`multimm.entries` lists the functions that are wrapped, and what becomes of a call. The wrappers are
the same for everybody and stay while anybody needs them (a count under a lock); a context variable
decides at each call who asked for multimm. So other threads and asynchronous tasks get Dask's own
product even while the wrappers are in place.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, TypeVar

import dask.array as da
from dask.array.core import Array as ClassicArray

from multimm.acceleration_report import Call, Report
from multimm.entries import (
    ENTRIES,
    OF_BLOCKS,
    Args,
    Kwargs,
    LeftToDaskError,
    inside,
    operands_of,
    product,
)
from multimm.errors import ArrayTypeError, DTypeError, OptionError, one_line
from multimm.graph.block_dots import with_our_dots
from multimm.operands import is_dask

logger = logging.getLogger(__name__)

Function = Callable[..., Any]
Decorated = TypeVar("Decorated")


@dataclass(eq=False)
class Session:
    """One `with accelerate()`; ended sessions linger in contexts that were copied from it."""

    outer: Session | None
    active: bool = True
    report: Report = field(default_factory=Report)

    @classmethod
    def begin(cls) -> Session:
        """A session inside of the one that the caller is in."""
        if da.Array is not ClassicArray:
            raise ArrayTypeError(
                "accelerate() with Dask's array query planning on: its arrays have no matrix "
                "product; set `array.query-planning` to False before importing dask.array"
            )
        PATCH.acquire()
        return cls(accelerated())

    def note(self, call: Call, *, taken: bool) -> None:
        """Report a call, here and in the sessions around."""
        session: Session | None = self
        while session is not None:
            if session.active:
                (session.report.taken if taken else session.report.left).append(call)
            session = session.outer

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
        # Who patched before us may have named his function anything.
        found = {getattr(owner, name): name for owner, name in ENTRIES}
        wrappers = {original: _wrap(original, name) for original, name in found.items()}
        for owner, name in ENTRIES:
            original = getattr(owner, name)
            wrapper = wrappers[original]
            setattr(owner, name, wrapper)
            self.originals.append((owner, name, original, wrapper))
        _forget_what_opt_einsum_found()

    def _restore(self) -> None:
        for owner, name, original, wrapper in self.originals:
            # Whoever patched on top of us keeps that; our wrapper below does nothing any more.
            if getattr(owner, name) is wrapper:
                setattr(owner, name, original)
        self.originals.clear()
        _forget_what_opt_einsum_found()


def _forget_what_opt_einsum_found() -> None:
    """It looks a function up once, and keeps it: Dask's own one from before, or our wrapper."""
    table = getattr(sys.modules.get("opt_einsum.backends.dispatch"), "_cached_funcs", {})
    for key in [key for key in [*table] if key[1] == "dask"]:
        table.pop(key, None)


PATCH = Patch()
# Who forks waits for a thread that changes the wrappers: in the child nobody would go on.
os.register_at_fork(
    before=PATCH.lock.acquire,
    after_in_parent=PATCH.lock.release,
    after_in_child=PATCH.lock.release,
)
SESSION: ContextVar[Session | None] = ContextVar("multimm_accelerate", default=None)


class Acceleration(AbstractContextManager[Report]):
    """What `accelerate()` returns: a context manager, and a decorator."""

    def __init__(self) -> None:
        self._entered: dict[Session, Token[Session | None]] = {}

    def __enter__(self) -> Report:
        session = Session.begin()
        self._entered[session] = SESSION.set(session)
        return session.report

    def __exit__(self, *_: object) -> None:
        # Of several threads or tasks that have entered, the one that leaves ends its own session.
        current = SESSION.get()
        session = current if current in self._entered else [*self._entered][-1]
        token = self._entered.pop(session)
        session.close()
        if current is not session:
            return  # one that began later goes on: of two generators, say, that run in turns
        try:
            SESSION.reset(token)
        except ValueError:
            # A generator that is closed from another context than it ran in.
            logger.debug("accelerate() ended in another context than it began in")

    def __call__(self, func: Decorated) -> Decorated:
        """The function, each of whose calls is inside."""
        if isinstance(func, classmethod | staticmethod):
            return type(func)(self(func.__func__))
        # An object that is called runs its class's method.
        called = func if inspect.isroutine(func) else vars(type(func)).get("__call__")
        kinds = inspect.isgeneratorfunction, inspect.isasyncgenfunction
        steps = any(kind(one) for kind in kinds for one in (func, called))
        if isinstance(func, type) or steps or not callable(func):
            raise _undecorated(func)

        def function(*args: Any, **kwargs: Any) -> Any:
            made = _inside(func, args, kwargs)
            if inspect.isgenerator(made) or inspect.isasyncgen(made):
                raise _undecorated(made)
            # Of a function that makes one of a coroutine nobody could tell before.
            return within(made) if inspect.iscoroutine(made) else made

        async def within(made: Any) -> Any:
            with Acceleration():
                return await made

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            with Acceleration():
                return await func(*args, **kwargs)

        inner: Any = coroutine if inspect.iscoroutinefunction(func) else function
        return wraps(func)(inner)  # type: ignore[return-value]


def _inside(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """What a function returns that is called inside: a task that goes on stays there."""
    session, made = Session.begin(), None
    token = SESSION.set(session)
    try:
        made = func(*args, **kwargs)
    finally:
        SESSION.reset(token)
        if asyncio.isfuture(made) and not made.done():
            made.add_done_callback(lambda _: session.close())
        else:
            session.close()
    return made


def _undecorated(func: Any) -> OptionError:
    name = "multimm.accelerate()"
    return OptionError(
        f"@{name} decorates functions, coroutine functions and methods, got {func!r}: "
        f"decorate the methods of a class, or what a generator calls, or use `with {name}:`"
    )


def accelerate() -> Acceleration:
    """Let products of Dask arrays go through multimm inside a ``with``, and report what did.

    That holds, with a Dask array among the operands, for ``x @ y``, ``da.matmul``, ``da.dot``,
    ``x.dot(y)``, ``da.tensordot`` and ``da.einsum``; for NumPy's functions ``matmul``, ``dot``,
    ``tensordot``, ``einsum``, ``inner``, ``vecdot``, ``matvec``, ``vecmat`` and
    ``linalg.multi_dot``; for ``xr.dot``, and ``@`` and ``.dot`` of DataArrays. What is built on
    these follows, such as ``da.cov``. Blocks are multiplied by multimm's kernels inside of
    ``da.linalg.solve``, ``inv``, ``lu``, ``cholesky``, ``qr``, ``tsqr`` and ``svd``, too. Results
    are lazy as always, in Dask's chunks; what counts is where a product is written, not where it is
    computed. Blocks and devices are those that `multimm.matmul` takes.

    Only the thread or asynchronous task that entered is affected, with the tasks it creates
    inside. Sessions nest, and Dask is as before when the last one has ended, by an exception
    too.

    Also a decorator, ``@multimm.accelerate()``, of functions, methods and coroutine functions, and
    of those that return an asyncio task or future, which is inside until it is done. A generator
    shares the context of its caller: in one, put the ``with`` around each step.

    Returns
    -------
    context manager and decorator
        Of ``with multimm.accelerate() as report:`` the report says afterwards which calls were
        taken (``report.taken``), and which were left to Dask and why (``report.left``);
        ``print(report)`` shows both. Calls of sessions inside are in it as well.

    Raises
    ------
    ArrayTypeError
        On entering, with Dask's array query planning switched on.
    OptionError
        As a decorator of a class, or of a generator function.

    Notes
    -----
    What multimm does not multiply goes to Dask as before, with a line in the report and in the
    debug log: bool, object and string dtypes, sparse and masked blocks, unknown chunk sizes,
    keyword arguments such as ``out=``, and sums of products that are no product of matrices, such
    as ``"ij,ij->ij"`` or an outer product. Wrong shapes raise at the call.

    Results have Dask's dtype: sums of short integers are in 64 bits, and exact there, where Dask's
    wrap around within a block; where Dask's ``@`` sums no blocks, it is that of the operands.
    `numpy.inner` and others that Dask has none of have NumPy's. With ``np.matmul(x, y,
    dtype="int32")`` a product takes less memory. Products of bools are Dask's, which counts the
    blocks in which one is true.

    A function imported before, as in ``from dask.array import matmul``, is Dask's own object and
    cannot be redirected; ``da.matmul`` and ``@`` can. opt_einsum's table of such functions is
    emptied of Dask's when the first session begins.

    Examples
    --------
    >>> import dask.array as da, multimm
    >>> x = da.ones((4, 3), chunks=2)
    >>> with multimm.accelerate() as report:
    ...     y = da.einsum("ij,kj->ik", x, x)
    ...     z = da.einsum("ij->i", x)
    >>> y.name.startswith("multimm")
    True
    >>> print(report)
    taken (1)
      einsum of 4x3 float64 and 4x3 float64: 1 x product
    left to Dask (1)
      einsum of 4x3 float64: no product of matrices: one operand
    """
    return Acceleration()


def accelerated() -> Session | None:
    """The session that the caller is inside of; None inside multimm's own work, too."""
    session = SESSION.get()
    while session is not None and not session.active:
        session = session.outer
    return session


def _wrap(original: Function, name: str) -> Function:
    """`original`, or multimm where the caller asked for it and it computes the same."""

    @wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # All else is a function of this module: what travels to a worker holds no context.
        return _call(original, name, args, kwargs)

    return wrapper


def _call(original: Function, name: str, args: Args, kwargs: Kwargs) -> Any:
    session = accelerated()
    if session is None:
        return original(*args, **kwargs)
    if name in OF_BLOCKS:
        return _with_our_dots(session, name, original, args, kwargs)
    found = name, args, kwargs
    if name.startswith("__array"):
        inner = inside(name, args, kwargs)
        if inner is None:
            return original(*args, **kwargs)
        found = inner
    return _taken(session, found, partial(original, *args, **kwargs))


def _taken(session: Session, found: tuple[str, Args, Kwargs], dask: Callable[[], Any]) -> Any:
    """What multimm makes of a call, or Dask."""
    # Note: multimm's own code, and Dask's fallback, must reach Dask's own functions.
    token = SESSION.set(None)
    try:
        try:
            made = product(*found)
            result = made.compute()
        except (LeftToDaskError, DTypeError, ArrayTypeError, OptionError) as error:
            reason = one_line(error)
        else:
            session.note(Call(found[0], operands_of(found[1]), made.note), taken=True)
            return result
        session.note(Call(found[0], operands_of(found[1]), reason), taken=False)
        logger.debug("left to Dask: %s", reason)
        return dask()
    finally:
        SESSION.reset(token)


def _with_our_dots(
    session: Session, name: str, original: Function, args: Args, kwargs: Kwargs
) -> Any:
    """What Dask makes, with multimm's products of blocks in its tasks."""
    made = original(*args, **kwargs)
    given = [x for x in (*args, *kwargs.values()) if is_dask(x)]
    arrays, count = with_our_dots(made if isinstance(made, tuple) else (made,), given)
    if not count:
        return made
    note = f"{count} x product of blocks"
    session.note(Call(name.lstrip("_"), operands_of(args), note), taken=True)
    return arrays if isinstance(made, tuple) else arrays[0]
