"""What all tests share lies next to this file: pytest makes this folder importable because of it."""

import gc
import os
import shutil
import signal
import tempfile

from hypothesis import HealthCheck, settings

# An example that a busy machine makes slow is no failure.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# torch asks a name server for the name of every peer; one that does not answer would cost 5 s each time.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# Agents of tests are found by tests only. A short path: that of a socket may not be longer than a hundred characters.
os.environ["TENAX_PRIVATE_DIR"] = tempfile.mkdtemp(prefix="tenax-")

# Programs that tests start find signals as a login shell leaves them, also under nohup and in the background of a
# script: a handler of this process becomes the default in theirs, whereas an ignored signal would stay ignored.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

pytest_plugins = ["kit.etcd", "kit.kinds"]  # the fixtures etcd and make_etcd; the kind of every test


def pytest_collection_finish() -> None:
    """Thousands of collected tests live until the end: a collection of garbage need not look at them each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["TENAX_PRIVATE_DIR"], ignore_errors=True)
