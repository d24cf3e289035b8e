"""A running cluster as the value that plans are made from, with the rates that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from multimm.cluster.calibration import store
from multimm.cluster.calibration.run import measure_rates
from multimm.cluster.inspect.cluster_spec import as_shipped, listed
from multimm.errors import OptionError
from multimm.planning.hardware import ClusterSpec

if TYPE_CHECKING:
    from distributed import Client


def describe(client: Client, *, measure: bool = False) -> ClusterSpec | None:
    """Read the workers, their memory, their kind and their links from a client.

    Rates of block products and links are those that were measured on workers of the same kind,
    in this process or an earlier one of this user, and the shipped ones where none were.

    Never waits for workers to arrive. A worker counts as a GPU worker where dask-cuda
    started it; a plain worker on a host with GPUs is a CPU worker.

    Parameters
    ----------
    client : distributed.Client
        An asynchronous client cannot be asked from synchronous code: what its cluster
        object (``Client(cluster, asynchronous=True)``) knows is used, and GPU workers are
        told by their ``ucxx`` address.
    measure : bool
        Measure the rates first, which takes some seconds, and keep them in the user's cache
        (``MULTIMM_CACHE_DIR`` names another place): later plans are made from them.

    Returns
    -------
    ClusterSpec or None
        Workers sorted by address. None while there are no workers, after the client was
        closed, and for an asynchronous client that was given an address only.

    Raises
    ------
    OptionError
        If `client` is none, or if an asynchronous one is to measure.
    ClusterError
        If there are no workers to measure, if they are busy, or if one is lost meanwhile.
    """
    if not hasattr(client, "asynchronous"):  # without importing distributed
        raise OptionError(f"client={client!r}: give a distributed.Client, such as start() returns")
    if measure:
        store.keep(measure_rates(client))
    return described(client, listed(client))


def described(client: Client, workers: Mapping[str, Any]) -> ClusterSpec | None:
    """`describe` of workers that the scheduler has just listed."""
    if not workers:
        return None
    spec = as_shipped(client, workers)
    several_hosts = len({worker["host"] for worker in workers.values()}) > 1
    return store.applied(spec, store.stored(), scattered=several_hosts and spec.per_node == 0)
