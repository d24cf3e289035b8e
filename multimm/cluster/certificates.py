"""What `distributed.Security` must bring, before it is used: encryption, and certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multimm.errors import OptionError

if TYPE_CHECKING:
    from distributed import Security

#: How to ask for encryption.
ASK = (
    "distributed.Security.temporary(), or distributed.Security(require_encryption=True, ...) with "
    "certificates"
)


def check_encrypts(security: Security) -> None:
    """Raise OptionError for credentials that would be taken, and not used."""
    if not hasattr(security, "require_encryption"):  # without importing distributed
        raise OptionError(f"security={security!r}: give {ASK}")
    if not security.require_encryption:
        raise OptionError(
            "security without require_encryption: the cluster would talk in plaintext, with "
            f"certificates or without; give {ASK}, or leave security out"
        )


def check_certificates(security: Security, *roles: str) -> None:
    """Read those of some roles ("client", "worker", "scheduler"), or raise `OptionError`.

    distributed would try again until the timeout, and not name the file.
    """
    needed = ("tls_ca_file", *(f"tls_{role}_cert" for role in roles))
    files = {name: getattr(security, name) for name in (*needed, *(f"tls_{r}_key" for r in roles))}
    if missing := [name for name in needed if not files[name]]:
        whose = "a client needs" if roles == ("client",) else "each side needs"
        raise OptionError(
            f"security without {' and '.join(missing)}: {whose} the authority's certificate "
            "and its own, with its key; give them, or set distributed.comm.tls in Dask's "
            "configuration"
        )
    try:
        for role in roles:
            security.get_connection_args(role)
    except OSError as error:  # ssl.SSLError, too
        # In memory they are texts of many lines.
        named = ", ".join(
            f"{name}={path if chr(10) not in path else '(in memory)'}"
            for name, path in files.items()
            if path
        )
        raise OptionError(
            f"certificates cannot be read ({error}): {named}; the files must exist, be readable, "
            "hold PEM, and belong together"
        ) from error
