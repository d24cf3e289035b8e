"""Reach a cluster that is already running."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from multimm.cluster.options import check_certificates
from multimm.errors import ClusterError, OptionError, cause, how_to_install_for_gpus

if TYPE_CHECKING:
    from distributed import Client, Security

#: Seconds to wait for a greeting, after a connection has failed already; arbitrary.
GREETING_SECONDS = 0.5


def connect(
    address: str | Client,
    *,
    timeout: float = 10,
    security: Security | None = None,
    overlap: bool = False,
) -> Client:
    """Connect to a running scheduler and install multimm's plugins there.

    Parameters
    ----------
    address : str or distributed.Client
        ``"tcp://host:8786"``, ``"tls://host:8786"``, ``"ucxx://host:8786"`` or ``"host:8786"``. Or
        a synchronous client that is connected already: it is returned, and stays the current one or
        not. For an asynchronous one ``await prepare(client)``.
    timeout : float
        Seconds to wait for an answer.
    security : distributed.Security, optional
        TLS credentials; a ``tls://`` address needs them, and no other address takes any.
    overlap : bool
        Let blocks travel as in clusters from `start`. Over TCP and TLS workers of one host copy
        them from each other's memory: GPU blocks from memory pools (CUDA IPC), where there are
        pools, and NumPy blocks on Linux. So does a client on their host, which fetches results from
        workers directly then. GPU blocks travel while products are computed: what copies them, and
        UCXX, unless its release is not known, waits for stream 0 alone, on all workers and for
        everybody who uses the cluster. So tasks that run kernels on CUDA streams of their own must
        synchronise them before they return, as multimm's do. All pairs of workers exchange a block,
        which takes some seconds, and kernels are compiled.

    Returns
    -------
    distributed.Client
        The current client from now on. Closing it leaves the cluster running.

    Raises
    ------
    OptionError
        An address without host and port, a timeout that is not positive, ``tls://`` without
        `security`, `security` with an address that is not encrypted or with a client, certificates
        that cannot be read, or an asynchronous client.
    ClusterError
        Nothing answers in time, what answers cannot be used, one side refuses the other's
        certificate, or the client is closed.
    """
    if not isinstance(address, str):
        return _equipped(address, security, overlap)
    scheme = _check(address, timeout, security)
    from multimm.cluster.client import set_up_cluster

    try:
        client = _connected(address, timeout, security)
    except Exception as error:
        # TimeoutError and OSError from sockets, ValueError for a transport that is not
        # installed, TypeError for wrong credentials: one answer for all of them.
        raise ClusterError(_reason(address, scheme, timeout, error)) from error
    try:
        set_up_cluster(client, overlap=overlap)
    except BaseException:
        client.close()
        raise
    return client


def prepare(client: Client) -> Awaitable[None]:
    """Install multimm's plugins on the cluster of a client, before its products.

    ``await prepare(client)`` of an asynchronous client. In an event loop a product cannot wait for
    the plugins: without this it warns, and Dask alone places its blocks. A synchronous client has
    them when this returns, and what is returned may be awaited or not; without this its first
    product installs them. `start` and `connect` do, too. Once for each client is enough, and once
    more after its scheduler was started again.

    Parameters
    ----------
    client : distributed.Client
        Running. An asynchronous one is best made as ``await Client(cluster, asynchronous=True)``
        with a cluster object: of one that was given an address the workers are not known, and
        products are planned for one.

    Raises
    ------
    OptionError
        If `client` is none.
    ClusterError
        The client is closed, or the scheduler or a worker cannot load the plugins.

    Examples
    --------
    >>> import asyncio, dask.array as da, multimm
    >>> from distributed import Client
    >>> async def main():
    ...     async with Client(processes=False, asynchronous=True, dashboard_address=":0") as client:
    ...         await multimm.cluster.prepare(client)
    ...         x = da.ones((4, 4), chunks=2)
    ...         return await client.compute(multimm.matmul(x, x).sum())
    >>> print(asyncio.run(main()))
    64.0
    """
    _check_runs(client, "prepare")
    from multimm.graph.scheduler import install

    if client.asynchronous:
        return install.install_awaited(client)
    install.install(client)
    return _Done()


class _Done:
    """What has nothing left to wait for."""

    def __await__(self) -> Generator[Any, Any, None]:
        yield from ()


def _equipped(client: Client, security: Security | None, overlap: bool) -> Client:
    """A client that the caller has connected."""
    if not hasattr(client, "asynchronous"):
        raise OptionError(
            f"scheduler address {client!r}: give text, such as tcp://host:8786, or a "
            "distributed.Client"
        )
    _check_runs(client, "connect")
    if security is not None:
        raise OptionError("connect(client) with security: the client has its own; leave it out")
    if client.asynchronous:
        raise OptionError(
            "connect(client) of an asynchronous client: run `await "
            "multimm.cluster.prepare(client)` in its event loop"
        )
    from multimm.cluster.client import set_up_cluster

    set_up_cluster(client, overlap=overlap)
    return client


def _check_runs(client: Client, verb: str) -> None:
    if not hasattr(client, "asynchronous"):  # without importing distributed
        raise OptionError(f"client={client!r}: give a distributed.Client")
    if client.status != "running":
        raise ClusterError(f"the client is {client.status}: {verb} it while it is connected")


def _connected(address: str, timeout: float, security: Security | None) -> Client:
    """Connect, up to three times where distributed does not expect what happens.

    What the scheduler tells all clients, such as that one cancels tasks, may come in one message
    with its answer, where distributed expects that alone. And the thread of a new event
    loop does not begin within the 10 s that distributed gives it where Python collects a client
    there that nobody closed: that waits for a lock which whoever starts the thread holds.
    """
    from multimm.cluster.client import ClusterClient

    for _ in range(2):
        with suppress(AssertionError):
            return ClusterClient(address, timeout=timeout, security=security)
    return ClusterClient(address, timeout=timeout, security=security)


def _check(address: str, timeout: float, security: Security | None) -> str:
    scheme, _, rest = address.rpartition("://")
    host, _, port = rest.rpartition(":")
    if "@" in rest:
        shown = f"{scheme or 'tcp'}://***@{rest.rpartition('@')[2]}"
        raise OptionError(
            f"scheduler address {shown}: Dask takes no user and password; leave them out, and "
            "give security=distributed.Security(...) with a tls:// address to show who you are"
        )
    if not host or not port.isdigit():
        raise OptionError(
            f"scheduler address {address!r}: host and port are needed, such as tcp://host:8786"
        )
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise OptionError(f"timeout={timeout!r}: seconds above 0 are needed")
    if scheme == "tls" and security is None:
        raise OptionError(
            f"scheduler address {address!r}: tls needs security=distributed.Security(...) "
            "with the cluster's certificates"
        )
    if scheme == "tls" and security is not None:
        check_certificates(security, "client")
    if scheme != "tls" and security is not None:
        raise OptionError(
            f"scheduler address {address!r} with security: {scheme or 'tcp'} is not encrypted, and "
            f"certificates would not be used; connect to tls://{rest}, or leave security out"
        )
    return scheme


def _reason(address: str, scheme: str, timeout: float, error: Exception) -> str:
    if isinstance(error, ValueError) and "unknown address scheme" in str(error):
        hint = (
            f"install the GPU packages: {how_to_install_for_gpus()}"
            if scheme in ("ucx", "ucxx")
            else "allowed are tcp, tls and ucxx"
        )
        return f"scheduler address {address!r}: transport {scheme!r} is not available; {hint}"
    if scheme == "tls" and _speaks_first(address):
        return f"the scheduler at {address} does not use TLS: connect to tcp://..."
    from distributed.comm.core import CommClosedError

    if isinstance(error, CommClosedError):  # something listens, and one side ended the connection
        return _refused(address, scheme, error)
    if isinstance(error, OSError):
        return (
            f"no scheduler answers at {address} within {timeout:g} s: check that it runs, the "
            "host, the port and the protocol (tcp, tls or ucxx)"
        )
    return f"cannot use the scheduler at {address}: {cause(error)}"


def _speaks_first(address: str) -> bool:
    """Whether something greets whoever connects, as Dask does; a TLS server waits to be greeted."""
    import socket

    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), GREETING_SECONDS) as link:
            return bool(link.recv(1))
    except OSError:  # nothing there, or nothing said in time
        return False


def _refused(address: str, scheme: str, error: BaseException) -> str:
    """Who refuses whom, as far as that can be known, and what to do."""
    from ssl import SSLCertVerificationError

    if scheme != "tls":
        return (
            f"the scheduler at {address} ends the connection: if it uses TLS, connect to tls://... "
            "with security=distributed.Security(...)"
        )
    if isinstance(error.__cause__, SSLCertVerificationError):
        return (
            f"the certificate of the scheduler at {address} is not to be trusted "
            f"({error.__cause__.verify_message}): give tls_ca_file=, the certificate of the "
            "authority that signed the scheduler's, and see that it has not expired"
        )
    # The other side's reason may or may not arrive before the end of the connection, and of
    # OpenSSL's errors distributed keeps the text alone.
    _, found, said = str(error).rpartition("Error: ")
    return (
        f"the scheduler at {address} refuses this client's certificate"
        f"{f' ({said})' if found else ''}: give tls_client_cert= and tls_client_key= signed by "
        "the cluster's authority, and see that they have not expired"
    )
