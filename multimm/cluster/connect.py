"""Reach a cluster that is already running."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multimm.errors import ClusterError, OptionError

if TYPE_CHECKING:
    from distributed import Client, Security


def connect(
    address: str,
    *,
    timeout: float = 10,
    security: Security | None = None,
    overlap: bool = False,
) -> Client:
    """Connect to a running scheduler and install multimm's plugins there.

    Parameters
    ----------
    address : str
        ``"tcp://host:8786"``, ``"tls://host:8786"``, ``"ucxx://host:8786"`` or ``"host:8786"``.
    timeout : float
        Seconds to wait for an answer.
    security : distributed.Security, optional
        TLS credentials; a ``tls://`` address needs them.
    overlap : bool
        Let blocks travel while products are computed, as in clusters from `start`. UCXX then
        waits for stream 0 alone before it moves GPU memory, on all workers and for everybody who
        uses the cluster: tasks that run kernels on CUDA streams of their own must synchronise
        them before they return, as multimm's do. Without UCXX, or with a release of it that is
        not known, nothing is changed. All pairs of workers exchange a block, which takes some
        seconds, and kernels are compiled.

    Returns
    -------
    distributed.Client
        The current client from now on. Closing it leaves the cluster running.

    Raises
    ------
    OptionError
        An address without host and port, a timeout that is not positive, or ``tls://``
        without `security`.
    ClusterError
        Nothing answers in time, or what answers cannot be used.
    """
    scheme = _check(address, timeout, security)
    from multimm.cluster.client import ClusterClient, prepare

    try:
        client = ClusterClient(address, timeout=timeout, security=security)
    except Exception as error:
        # TimeoutError and OSError from sockets, ValueError for a transport that is not
        # installed, TypeError for wrong credentials: one answer for all of them.
        raise ClusterError(_reason(address, scheme, timeout, error)) from error
    try:
        prepare(client, overlap=overlap)
    except BaseException:
        client.close()
        raise
    return client


def _check(address: str, timeout: float, security: Security | None) -> str:
    scheme, _, rest = address.rpartition("://")
    host, _, port = rest.rpartition(":")
    if not host or not port.isdigit():
        raise OptionError(
            f"scheduler address {address!r}: host and port are needed, such as tcp://host:8786"
        )
    if not timeout > 0:
        raise OptionError(f"timeout={timeout}: seconds above 0 are needed")
    if scheme == "tls" and security is None:
        raise OptionError(
            f"scheduler address {address!r}: tls needs security=distributed.Security(...) "
            "with the cluster's certificates"
        )
    return scheme


def _reason(address: str, scheme: str, timeout: float, error: Exception) -> str:
    if isinstance(error, ValueError) and "unknown address scheme" in str(error):
        hint = (
            'install the GPU packages (pip install "multimm[cuda13]" or "multimm[cuda12]")'
            if scheme in ("ucx", "ucxx")
            else "allowed are tcp, tls and ucxx"
        )
        return f"scheduler address {address!r}: transport {scheme!r} is not available; {hint}"
    if isinstance(error, OSError):
        return (
            f"no scheduler answers at {address} within {timeout:g} s: check that it runs, the "
            "host, the port and the protocol (tcp, tls or ucxx)"
        )
    return f"cannot use the scheduler at {address}: {error}"
