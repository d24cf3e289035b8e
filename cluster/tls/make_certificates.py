"""Make the certificates of one cluster: an authority, and one certificate for each role.

    python make_certificates.py DIRECTORY [--installed-at /etc/dask/tls] [--days 365]

Writes to DIRECTORY

    ca.pem           the authority's certificate: what everybody trusts
    ca-key.pem       its key: signs new certificates, and belongs on no machine of the cluster
    scheduler.pem    certificate and key, in one file, for the scheduler
    worker.pem       the same for workers and their nannies
    client.pem       the same for those who connect
    dask-tls.yaml    Dask's configuration that uses them, for every machine

Dask trusts whoever has a certificate of this authority, and looks at no host names: one authority
for one cluster, and nothing else signed by it.
"""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

#: The scheduler and workers are called and call others; a client only calls.
ROLES = {
    "scheduler": (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
    "worker": (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
    "client": (ExtendedKeyUsageOID.CLIENT_AUTH,),
}
#: Clocks of different machines differ: valid from a little before now.
EARLIER = timedelta(minutes=5)

CONFIGURATION = """\
# Written by make_certificates.py. In /etc/dask/ or ~/.config/dask/, or where DASK_CONFIG points.
distributed:
  comm:
    default-scheme: tls
    require-encryption: true
    tls:
      ca-file: {at}/ca.pem
      scheduler:
        cert: {at}/scheduler.pem
      worker:
        cert: {at}/worker.pem
      client:
        cert: {at}/client.pem
"""


def builder(
    name: str, key: ec.EllipticCurvePrivateKey, days: int, issuer: x509.Name | None = None
) -> x509.CertificateBuilder:
    """What all certificates have in common."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + timedelta(days=days))
    )


def make_authority(days: int) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """An authority that may sign certificates, and nothing further below."""
    key = ec.generate_private_key(ec.SECP256R1())
    only_below = x509.BasicConstraints(ca=True, path_length=0)
    certificate = builder("multimm cluster authority", key, days).add_extension(
        only_below, critical=True
    )
    return certificate.sign(key, hashes.SHA256()), key


def make_certificate(
    role: str,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> bytes:
    """Certificate and key of a role, as the text of one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        builder(f"multimm {role}", key, days, authority.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(ROLES[role]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM) + private(key)


def private(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A key as the text of a file, not encrypted: services start without a person."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def write(path: Path, content: bytes, mode: int) -> None:
    """A new file that nobody else could read, not even while it was being written."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def main(arguments: list[str] | None = None) -> None:
    """Write everything into one directory."""
    parser = argparse.ArgumentParser(description="Make the certificates of one Dask cluster.")
    parser.add_argument("directory", type=Path, help="where to write; must be empty or not exist")
    parser.add_argument(
        "--installed-at", help="where the cluster's machines find them (default: DIRECTORY)"
    )
    parser.add_argument("--days", type=int, default=365, help="how long they are valid")
    options = parser.parse_args(arguments)
    directory: Path = options.directory
    if options.days < 1:
        parser.error(f"--days {options.days}: at least 1 is needed")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(directory.iterdir()):
        parser.error(f"{directory} is not empty: certificates in use are not overwritten")

    authority, key = make_authority(options.days)
    write(directory / "ca.pem", authority.public_bytes(serialization.Encoding.PEM), 0o644)
    write(directory / "ca-key.pem", private(key), 0o600)
    for role in ROLES:
        content = make_certificate(role, authority, key, options.days)
        write(directory / f"{role}.pem", content, 0o600)
    at = options.installed_at or str(directory.resolve())
    write(directory / "dask-tls.yaml", CONFIGURATION.format(at=at).encode(), 0o644)
    print(f"{directory}: certificates for {', '.join(ROLES)}, valid for {options.days} days")


if __name__ == "__main__":
    main()
