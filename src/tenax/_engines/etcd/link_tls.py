"""TLS for links to an elected leader, with the same certificates as the connections to etcd.

Both sides show a certificate signed by ``ca_cert``. The leader announces the SHA-256 digest of its certificate in etcd,
and a node links only to a leader that shows that certificate. Host names are not compared: any node may lead, at an
address that its certificate need not contain, and any writer to etcd may lead.
"""

from __future__ import annotations

import hashlib
import ssl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tenax._io.tls import TlsFiles

_NOT_ANNOUNCED = "its certificate is not the one announced in etcd"
_UNENCRYPTED = "or disable TLS between agents with --rdzv-conf link_tls=false"


class OwnCertificate:
    """This node's certificate, as a peer sees it. Raises ValueError if no other node would accept it."""

    def __init__(self, files: TlsFiles) -> None:
        self.context = files.for_server()
        client = files.for_client()
        client.check_hostname = False
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        connecting = client.wrap_bio(to_client, to_server)
        serving = self.context.wrap_bio(to_server, to_client, server_side=True)
        for side, usage in ((connecting, "serverAuth"), (serving, "clientAuth")) * 3:  # TLS 1.2 takes 3 rounds
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                raise ValueError(_unusable(files, error, usage)) from error
        self.digest = _digest(connecting.getpeercert(binary_form=True))
        subject: Any = (serving.getpeercert() or {}).get("subject", ())
        self.common_name: str = next((value for part in subject for key, value in part if key == "commonName"), "")


def _unusable(files: TlsFiles, error: ssl.SSLError, usage: str) -> str:
    reason = getattr(error, "verify_message", "") or error.reason or str(error)
    if "purpose" in reason:
        reason = f"its extended key usage lacks {usage}"
        remedy = "any node may become the leader, so its certificate needs serverAuth and clientAuth"
    else:
        remedy = f"expected a valid one signed by an authority in {files.ca} (the file may contain several)"
    return f"the certificate {files.cert} cannot be used between agents: {reason}; {remedy}, {_UNENCRYPTED}"


def follower_context(files: TlsFiles, digest: bytes) -> ssl.SSLContext:
    """Return a context that accepts only the certificate with this digest. Raises ValueError."""
    context = files.for_client()
    context.check_hostname = False  # the digest is stricter

    class Pinned:
        def do_handshake(self, *arguments: Any) -> None:
            super().do_handshake(*arguments)  # type: ignore[misc]
            if _digest(self.getpeercert(binary_form=True)) != digest:  # type: ignore[attr-defined]
                error = ssl.SSLCertVerificationError(1, _NOT_ANNOUNCED)
                error.reason = error.verify_message = _NOT_ANNOUNCED
                raise error

    context.sslobject_class = type("PinnedObject", (Pinned, ssl.SSLObject), {})
    context.sslsocket_class = type("PinnedSocket", (Pinned, ssl.SSLSocket), {})
    return context


def _digest(certificate: bytes | None) -> bytes:
    return hashlib.sha256(certificate or b"").digest()
