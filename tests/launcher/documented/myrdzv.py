"""The older documents' rendezvous handler: only the documented methods, and a tuple as the answer."""

from tenax.rendezvous import RendezvousHandler
from tenax.store import MemoryStore


class MyRendezvousHandler(RendezvousHandler):
    def __init__(self, params):
        self._params = params
        self._is_closed = False

    def next_rendezvous(self):
        return MemoryStore(), 0, 1

    def is_closed(self):
        return self._is_closed

    def set_closed(self):
        self._is_closed = True

    def num_nodes_waiting(self):
        return 0

    def get_run_id(self):
        return self._params["run_id"]

    def shutdown(self):
        return True
