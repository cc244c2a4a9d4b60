"""Settings for all tests. Because of this file pytest makes this folder importable."""

import gc
import os
import shutil
import signal
import tempfile

from hypothesis import HealthCheck, settings

# A slow example on a busy machine is not a failure.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# torch resolves the name of every peer; a name server that does not answer would take 5 s each time.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# Only tests find the agents of tests. The path is short, because that of a socket is limited to about 100 characters.
os.environ["TENAX_PRIVATE_DIR"] = tempfile.mkdtemp(prefix="tenax-")

# Programs that tests start get the default signal handlers, also under nohup and in the background of a script: a
# handler of this process becomes the default in theirs, whereas an ignored signal would stay ignored.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

gc.disable()  # until the tests are collected: hardly any of that becomes garbage

# The fixtures etcd, make_etcd and torch_python; the kind of every test.
pytest_plugins = ["kit.etcd", "kit.kinds", "kit.torch_python"]


def pytest_collection_finish() -> None:
    """Exclude the thousands of collected tests, which live until the end, from garbage collection."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["TENAX_PRIVATE_DIR"], ignore_errors=True)
