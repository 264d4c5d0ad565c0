"""X.509 primitives: a CA, certificates for names, and revocation lists.

All keys are P-256. Validity begins one day in the past, because clocks differ, and lasts for years, because a small board without a clock
may have any date: identities are ended early by the revocation list.
"""

import hashlib
import ipaddress
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from edge_fl.wire.identity import IdentityError, Key, common_name, subject

BACKDATED = timedelta(days=1)
CA_LIFE = timedelta(days=365 * 20)

PublicKey = ec.EllipticCurvePublicKey


def authority(name: str, key: Key, now: datetime) -> x509.Certificate:
    """A CA that can sign leaf certificates only."""
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    builder = _builder(name, subject(name), key.public_key(), now, CA_LIFE)
    return (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def leaf(
    name: str,
    public_key: PublicKey,
    ca: x509.Certificate,
    ca_key: Key,
    now: datetime,
    life: timedelta,
    hosts: Sequence[str] = (),
) -> x509.Certificate:
    """A certificate for `name`: a client's, or with `hosts` that of a broker reached under these names and addresses."""
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
    ends = min(life, ca.not_valid_after_utc - now)
    builder = _builder(name, ca.subject, public_key, now, ends)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    if hosts:
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def revocations(
    revoked: Iterable[tuple[int, datetime]], ca: x509.Certificate, ca_key: Key, now: datetime
) -> x509.CertificateRevocationList:
    """A revocation list of (serial, time of revocation). It is valid as long as the CA: an expired list would block all clients."""
    builder = x509.CertificateRevocationListBuilder().issuer_name(ca.subject)
    builder = builder.last_update(now - BACKDATED).next_update(ca.not_valid_after_utc)
    for serial, since in revoked:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(since).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(ca_key, hashes.SHA256())


def read_request(pem: bytes) -> tuple[str, PublicKey]:
    """Name and key of a request that is signed with that key. Raises IdentityError."""
    try:
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        if (
            not isinstance(key, PublicKey)
            or not isinstance(key.curve, ec.SECP256R1)
            or not request.is_signature_valid
        ):
            raise IdentityError("request not signed with its own P-256 key")
    except ValueError as error:
        raise IdentityError(f"not a certificate request ({error})") from error
    return common_name(request.subject), key


def fingerprint(key: PublicKey) -> str:
    """SHA-256 of a public key."""
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).hexdigest()


def pem(thing: x509.Certificate | x509.CertificateRevocationList) -> bytes:
    """Encode as PEM."""
    return thing.public_bytes(serialization.Encoding.PEM)


def _builder(
    name: str, issuer: x509.Name, key: PublicKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject(name))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - min(BACKDATED, life))
        .not_valid_after(now + life)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
