"""examples/train_ddp.py with a dataset that records its samples and injects faults.

In the folder ``RECORDS`` every rank of every generation writes the indices of its samples, in order. ``FAULTS`` (JSON)
lists faults: ``{"1-0": [17, ""]}`` kills rank 0 of generation 1 at its 17th sample; with the path of a named pipe
instead of ``""`` it writes to the pipe and waits to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_ddp
from torch.utils.data import Dataset


class Recording(Dataset):
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        name = f"{os.environ['TENAX_GENERATION']}-{os.environ['RANK']}"
        self._fault_at, self._pipe = json.loads(os.environ["FAULTS"]).get(name, (0, ""))
        self._taken = 0
        # One write per sample, so that the record is complete when the process is killed.
        self._record = os.open(Path(os.environ["RECORDS"]) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        self._taken += 1
        if self._taken == self._fault_at:
            if not self._pipe:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(os.open(self._pipe, os.O_WRONLY), b"here")
            signal.pause()
        os.write(self._record, f"{index}\n".encode())
        return self._dataset[index]


if __name__ == "__main__":
    args = train_ddp.parse()
    train_ddp.main(Recording(train_ddp.make_dataset(args.samples)), train_ddp.make_dataset(16, seed=1), args)
    # A process group that outlives the training may abort the process.
    names = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
    assert not any("gloo" in name for name in names), names
