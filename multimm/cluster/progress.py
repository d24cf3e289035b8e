"""A bar for all that is computed inside of a ``with``, on a cluster or by Dask's own schedulers."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from dask.callbacks import Callback

from multimm.display.tally import Bar, Count, Tally, stdout
from multimm.display.units import duration
from multimm.errors import OptionError

if TYPE_CHECKING:
    from distributed import Client

    from multimm.planning.explain.comparison import Comparison
    from multimm.planning.plan import MatmulPlan

#: Seconds between two looks; arbitrary.
INTERVAL = 0.25
#: Of tasks that are not done.
OPEN = ("waiting", "processing", "queued", "no-worker")


def progress(plan: MatmulPlan | None = None, *, out: Any = None) -> Progress:
    """Show how far Dask is with all that is computed inside, what it does, and the time left.

    ``with multimm.progress() as run:`` works with the current client, and without one. What was
    persisted inside is waited for at the end. In a terminal or a notebook one line is drawn again
    and again; where output goes to a file there are five lines at most.

    Parameters
    ----------
    plan : MatmulPlan, optional
        Of the product inside: how long it takes is known before the first task is done, and
        ``print(run)`` afterwards shows what was predicted beside what was measured.
    out : stream, optional
        Where the bar goes. Default: `sys.stdout`.

    Returns
    -------
    Progress
        With `seconds`, `tasks` and, of a `plan`, `comparison`, when the ``with`` is over.

    Raises
    ------
    OptionError
        If `plan` is none; when entered, if the current client is asynchronous: its event loop
        cannot be waited for. Use Dask's dashboard then.

    Examples
    --------
    >>> import dask.array as da, multimm
    >>> x = da.ones((400, 400), chunks=200)
    >>> with multimm.progress() as run:
    ...     c = multimm.matmul(x, x).compute(scheduler="threads")  # doctest: +ELLIPSIS
    [########################] 100%  ... tasks, ...
    """
    if plan is not None and not hasattr(plan, "time_terms"):
        raise OptionError(f"plan={plan!r}: give what multimm.plan returns")
    return Progress(plan, stdout() if out is None else out)


class Progress:
    """What `progress` returns; ``print`` says what there was to do, and how long it took.

    Attributes
    ----------
    seconds : float
        From the beginning to the end of the ``with``.
    tasks : int
        That were seen to be done in it: of what takes less than a second some may be missed.
    comparison : Comparison or None
        What the plan predicted beside what was measured.
    """

    def __init__(self, plan: MatmulPlan | None, out: Any, label: str = "") -> None:
        self.seconds, self.tasks = 0.0, 0
        self.comparison: Comparison | None = None
        self._plan, self._out, self._label = plan, out, label

    def __enter__(self) -> Self:
        from multimm.operands import current_client

        self._client = current_client()
        if self._client is not None and self._client.asynchronous:
            raise OptionError(
                "multimm.progress() waits, which an asynchronous client's event loop cannot: see "
                "Dask's dashboard, or use a synchronous client"
            )
        before = {} if self._client is None else counts_of(self._client)
        self._others = self._pending()
        self._received = self._bytes()
        self._local, self._over = _LocalTasks(), threading.Event()
        self._tally = Tally(before)
        predicted = 0.0 if self._plan is None else self._plan.seconds
        self._bar = Bar(self._tally, self._out, self._label, predicted)
        self._local.register()
        self._start = time.perf_counter()
        self._thread = threading.Thread(target=self._watch, name="multimm-progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            while kind is None and self._pending() - self._others:
                time.sleep(INTERVAL / 5)
        finally:
            self.seconds = time.perf_counter() - self._start
            self._over.set()
            self._thread.join()
            self._local.unregister()
            if kind is None:  # what failed is forgotten, which looks as if it were done
                self._look()
            self.tasks = self._tally.total - self._tally.left
            self._bar.end(self.seconds, stopped=kind is not None)
        if self._plan is not None and kind is None:
            before, now = self._received, self._bytes()
            moved = None if before is None or now is None else now - before
            self.comparison = self._plan.compare(self.seconds, bytes_moved=moved)

    def __str__(self) -> str:
        if self.comparison is not None:
            return str(self.comparison)
        return f"{self.tasks:,} tasks in {duration(self.seconds)}"

    def _repr_html_(self) -> str:
        from multimm.display.html import page

        return page(str(self)) if self.comparison is None else self.comparison._repr_html_()

    def _pending(self) -> set[Any]:
        """Keys of what the client waits for."""
        if self._client is None or self._client.status != "running":
            return set()
        return {key for key, at in [*self._client.futures.items()] if at.status == "pending"}

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL):
            self._look()
            self._bar.draw(time.perf_counter() - self._start)

    def _look(self) -> None:
        """Count tasks."""
        counts = self._local.counts()
        with suppress(Exception):  # a scheduler that is lost: the computation itself says so
            if self._client is not None:
                counts |= counts_of(self._client)
            self._tally.update(counts)

    def _bytes(self) -> int | None:
        """What all workers have received so far; None where nobody counts."""
        if self._client is None or self._plan is None:
            return None
        from multimm.cluster.plugins.transfer_counter import received_bytes

        with suppress(Exception):  # nobody counts there, or the client is closed by now
            return sum(received_bytes(self._client).values())
        return None


def counts_of(client: Client) -> dict[str, Count]:
    """Tasks that this client waits for, or that those need, by the names of their groups."""
    found = client.run_on_scheduler(count_tasks, client.id)
    return {name: Count(*count) for name, count in found.items()}


def count_tasks(client_id: str, dask_scheduler: Any) -> dict[str, tuple[int, int, float, int]]:
    """Runs on the scheduler."""
    state = dask_scheduler.clients.get(client_id)
    groups = {ts.group for ts in state.wants_what} if state is not None else set()
    ahead = [*groups]
    while ahead:
        new = ahead.pop().dependencies - groups
        groups |= new
        ahead += new
    return {
        group.name: (
            sum(group.states[at] for at in OPEN),
            len(group),
            group.duration,
            group.states["processing"],
        )
        for group in groups
    }


class _LocalTasks(Callback):
    """Tasks of Dask's schedulers within this process."""

    def __init__(self) -> None:
        self._counts: dict[str, Count] = {}
        self._begun: dict[Any, float] = {}
        self._lock = threading.Lock()

    def register(self) -> None:
        """Watch what is computed from now on."""
        # While another thread computes, Dask has another set in place of this one.
        self._registered = Callback.active
        self._registered.add(self._callback)

    def unregister(self) -> None:
        """Watch no more."""
        self._registered.discard(self._callback)

    def _start_state(self, dsk: Mapping[Any, Any], state: Mapping[str, Any]) -> None:
        with self._lock:
            for key in (*state["waiting"], *state["ready"]):
                self._add(key, left=1, total=1)

    def _pretask(self, key: Any, dsk: Any, state: Any) -> None:
        self._begun[key] = time.perf_counter()
        with self._lock:
            self._add(key, running=1)

    def _posttask(self, key: Any, result: Any, dsk: Any, state: Any, worker_id: Any) -> None:
        seconds = time.perf_counter() - self._begun.pop(key)
        with self._lock:
            self._add(key, left=-1, running=-1, seconds=seconds)

    def _finish(self, dsk: Any, state: Any, errored: bool) -> None:
        with self._lock:  # what one that failed has not done is not to be done any more
            for name, count in self._counts.items():
                done = count.total - count.left
                self._counts[name] = count._replace(left=0, total=done, running=0)

    def _add(self, key: Any, **more: float) -> None:
        name = str(key[0] if isinstance(key, tuple) else key)
        count = self._counts.get(name, Count(0, 0))
        changed = {field: getattr(count, field) + by for field, by in more.items()}
        self._counts[name] = count._replace(**changed)

    def counts(self) -> dict[str, Count]:
        """By name."""
        with self._lock:
            return dict(self._counts)
