"""The file store: several processes, killed and stopped writers, damage, compaction and removal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes import Program, forks_with_threads, program
from tenax.store import FileStore, StoreError, StoreTimeoutError
from tenax.store import _log_file as format_

__all__ = ["program"]

Start = Callable[..., Program]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.process
def test_concurrent_processes_lose_no_change(path: Path, program: Start) -> None:
    code = """
        import sys
        from tenax.store import FileStore
        store = FileStore(sys.argv[1], timeout=60)
        store.barrier("start", 4)
        for _ in range(200):
            store.add("n", 1)
        store.queue_push("done", sys.argv[2])
        store.wait(["all done"])
    """
    workers = [program(code, path, number) for number in range(4)]
    with FileStore(path, timeout=60) as store:
        assert sorted(store.queue_pop("done") for _ in workers) == [b"0", b"1", b"2", b"3"]
        assert store.get("n") == b"800"
        store.set("all done", "")
        assert [worker.wait() for worker in workers] == [0] * 4


@pytest.mark.process
def test_writers_killed_at_any_moment_leave_a_consistent_file(path: Path, program: Start) -> None:
    """Completed changes are kept, an interrupted one is complete or missing, and the others continue."""
    code = """
        import sys
        from tenax.store import FileStore
        store = FileStore(sys.argv[1], timeout=60)
        for number in range(1_000_000):
            store.multi_set([sys.argv[2] + "/a", sys.argv[2] + "/b"], [str(number) * 2000, str(number) * 2000])
    """
    with FileStore(path, timeout=60) as store:
        for number in range(8):
            worker = program(code, path, number)
            store.wait([f"{number}/a"])
            worker.send(signal.SIGKILL)
            assert worker.wait() == -signal.SIGKILL
            first, second = store.multi_get([f"{number}/a", f"{number}/b"])
            assert first == second
            store.set("k", str(number))
            assert store.get("k") == str(number).encode()


@pytest.mark.parametrize("left", range(1, 40, 3))
def test_a_truncated_record_is_removed_by_the_next_writer(path: Path, left: int) -> None:
    with FileStore(path, timeout=60) as store:
        store.set("k", "before")
        whole = path.read_bytes()
        store.set("k", "lost" * 20)
        torn = path.read_bytes()[len(whole) : len(whole) + left]
    path.write_bytes(whole + torn)
    with FileStore(path, timeout=60) as reader, FileStore(path, timeout=60) as writer:
        assert reader.get("k") == b"before"
        assert path.read_bytes() == whole + torn
        writer.set("n", "1")
        assert reader.multi_get(["k", "n"]) == [b"before", b"1"]
        assert path.read_bytes().startswith(whole)


def test_a_truncated_header_is_rewritten(path: Path) -> None:
    path.write_bytes(b"tenax st")
    with FileStore(path, timeout=60) as store:
        store.set("k", "v")
    assert FileStore(path).get("k") == b"v"


def test_a_foreign_file_is_not_changed(path: Path) -> None:
    path.write_bytes(b"my diary\n")
    with FileStore(path, timeout=60) as store:
        with pytest.raises(StoreError, match="is not a store"):
            store.set("k", "v")
        with pytest.raises(StoreError, match="is not a store"):
            store.check(["k"])
    assert path.read_bytes() == b"my diary\n"


def test_damage_in_the_middle_is_reported(path: Path) -> None:
    with FileStore(path, timeout=60) as store:
        store.set("k", "first")
        place = path.stat().st_size
        store.set("k", "second")
        store.set("k", "third")
    data = bytearray(path.read_bytes())
    data[place + 15] ^= 0xFF
    path.write_bytes(data)
    with FileStore(path, timeout=60) as store, pytest.raises(StoreError, match=f"damaged at byte {place}"):
        store.set("k", "fourth")


@pytest.mark.parametrize(
    "payload",
    [b"\x09\x00\x00\x00\x00\x00\x00\x00\x00", b"\x01\xff\xff\xff\xff\x00\x00\x00\x00", b"\x01", b"\x04" + bytes(8)],
    ids=["unknown kind", "giant key", "truncated", "pop of nothing"],
)
def test_complete_but_invalid_records_are_reported(path: Path, payload: bytes) -> None:
    with FileStore(path, timeout=60) as store:
        store.set("k", "v")
    record = format_._RECORD.pack(len(payload), format_.crc32(payload)) + payload
    path.write_bytes(path.read_bytes() + record)
    with FileStore(path, timeout=60) as store, pytest.raises(StoreError, match="damaged"):
        store.get("k")


@pytest.mark.process
def test_a_stopped_writer_blocks_writers_until_their_timeout_and_readers_never(path: Path, program: Start) -> None:
    code = """
        import os, signal, sys
        from tenax.store import FileStore
        store = FileStore(sys.argv[1], timeout=60)
        def stop(table):
            table.put(b"/k", b"half way")
            print("writing", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        store._change(stop)
    """
    with FileStore(path, timeout=60) as store:
        store.set("k", "before")
        worker = program(code, path)
        assert worker.pipe.line() == "writing"
        os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
        assert store.get("k") == b"before"
        store.set_timeout(0.05)
        with pytest.raises(StoreTimeoutError, match="locked"):
            store.set("k", "after")
        worker.send(signal.SIGKILL)
        worker.wait()
        store.set_timeout(60)
        store.set("k", "after")
        assert store.get("k") == b"after"


def test_the_file_is_compacted_while_others_use_it(path: Path) -> None:
    """Its size stays in proportion to its content."""
    with FileStore(path, timeout=60) as writer, FileStore(path, timeout=60) as other:
        writer.queue_push("q", "kept")
        other.set("mine", "kept")
        first = path.stat().st_ino
        for number in range(60):
            writer.set("big", bytes([number]) * 100_000)
            assert other.get("big") == bytes([number]) * 100_000
            other.set("mine", str(number))
        assert path.stat().st_ino != first
        assert path.stat().st_size < 2 << 20
        assert writer.get("mine") == b"59"
        assert FileStore(path).queue_pop("q") == b"kept"
        assert list(path.parent.iterdir()) == [path]


@pytest.mark.process
@forks_with_threads
def test_a_forked_process_has_its_own_lock(path: Path) -> None:
    with FileStore(path, timeout=60) as store:
        store.set("k", "v")
        children = []
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                try:
                    for _ in range(100):
                        store.add("n", 1)
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(pid)
        for _ in range(100):
            store.add("n", 1)
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
        assert store.get("n") == b"400"


def test_the_last_closed_handle_of_the_world_removes_the_file(path: Path) -> None:
    stores = [FileStore(path, 3) for _ in range(3)]
    stores[0].set("k", "v")
    for store in stores[:2]:
        store.close()
        store.close()
        assert path.exists()
    assert stores[2].list_keys() == ["k"]
    stores[2].close()
    assert not path.exists()
    with pytest.raises(StoreError, match="is closed"):
        stores[2].set("k", "v")


def test_an_unwritable_path_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file or directory"):
        FileStore(tmp_path / "missing" / "store")


def test_a_removed_folder_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with FileStore(folder / "store", timeout=60) as store:
        store.set("k", "v")
        (folder / "store").unlink()
        folder.rmdir()
        with pytest.raises(StoreError, match=r"could not access .*: No such file or directory"):
            store.get("k")
        with pytest.raises(StoreError, match=r"could not access .*: No such file or directory"):
            store.set("k", "v")


def test_only_the_owner_can_access_the_file(path: Path) -> None:
    FileStore(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
