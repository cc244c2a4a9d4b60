"""TLS for the tcp engine: which files, and what they mean.

With a certificate and its key this node can serve, and show itself to others. With a certificate authority it checks
the other side: every node the coordinator's certificate against the endpoint's host, the coordinator every node's
(mutual TLS). Read when needed; a file that cannot be used is a sentence, not a traceback.
"""

from __future__ import annotations

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths; empty where there is none."""

    cert: str = ""
    key: str = ""
    ca: str = ""

    def for_server(self) -> ssl.SSLContext:
        import ssl

        if not self.cert:
            raise ValueError("this node serves the endpoint and needs a certificate for that: ssl_cert, ssl_cert_key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(context)
        if self.ca:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def for_client(self) -> ssl.SSLContext:
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if not self.ca:
            context.load_default_certs()
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        import ssl

        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            if self.ca:
                context.load_verify_locations(self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(filter(None, (self.cert, self.key, self.ca)))
            reason = getattr(error, "reason", None) or error.strerror or error
            raise ValueError(f"the TLS files ({files}) cannot be used: {reason}") from error
