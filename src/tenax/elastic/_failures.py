"""Which exceptions report the end of a generation or a lost peer, and nothing about this process."""

from __future__ import annotations

import sys

# Of exceptions that have no class of their own: gloo's paths, and NCCL's and XLA's texts.
_TEXTS = (
    "gloo/transport/",
    "gloo/rendezvous/",
    "Connection closed by peer",
    "Connection reset by peer",
    "communicator was aborted",
    "ncclRemoteError",
)


class GenerationEnded(BaseException):
    """The generation has ended, and this process takes part in the next. The text is the reason.

    ``with generation`` catches it. It is not an ``Exception``, so that a handler for the errors of a batch does not.
    """


def follows_end(error: BaseException | None) -> bool:
    """Return whether the exception is ``GenerationEnded``, or was raised while that was handled."""
    pending, seen = [error], set()
    while pending:
        error = pending.pop()
        if isinstance(error, GenerationEnded):
            return True
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            pending += [error.__cause__, error.__context__]
    return False


def is_lost_peer(error: BaseException | None) -> bool:
    """Return whether the exception, or one in whose handling it was raised, reports a lost peer or store."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, _classes()) or (
            isinstance(error, RuntimeError | ValueError) and any(text in str(error) for text in _TEXTS)
        ):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _classes() -> tuple[type[BaseException], ...]:
    named = (("torch.distributed", "DistError"), ("tenax.store._api", "StoreError"))
    known = (getattr(sys.modules.get(module), name, None) for module, name in named)
    return (ConnectionError, *(each for each in known if each is not None))
