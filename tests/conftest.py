"""What all tests share lies next to this file: pytest makes this folder importable because of it."""

import os

# torch asks a name server for the name of every peer; one that does not answer would cost 5 s each time.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

pytest_plugins = ["etcd_servers"]  # the fixtures etcd and make_etcd
