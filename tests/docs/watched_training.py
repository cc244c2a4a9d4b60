"""examples/train_ddp.py with a dataset that is watched: which sample went where, and what happens when it does.

Below ``WATCHED`` (a folder) every rank of every generation writes the indices of the samples that it takes, in the
order in which it takes them. ``FATES`` (JSON) says what becomes of a worker: ``{"1-0": [17, ""]}`` kills rank 0 of
generation 1 when it takes its 17th sample; with the path of a named pipe instead of ``""`` it says so
there and waits for its end.
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


class Watched(Dataset):
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        me = f"{os.environ['TENAX_GENERATION']}-{os.environ['RANK']}"
        self._moment, self._pipe = json.loads(os.environ["FATES"]).get(me, (0, ""))
        self._taken = 0
        # One write for each, so that whoever is killed has told the truth.
        self._record = os.open(Path(os.environ["WATCHED"]) / me, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        self._taken += 1
        if self._taken == self._moment:
            if not self._pipe:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(os.open(self._pipe, os.O_WRONLY), b"here")
            signal.pause()
        os.write(self._record, f"{index}\n".encode())
        return self._dataset[index]


if __name__ == "__main__":
    asked = train_ddp.parse()
    train_ddp.main(Watched(train_ddp.make_dataset(asked.samples)), train_ddp.make_dataset(16, seed=1), asked)
    # A group that outlives its end may abort the process.
    names = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
    assert not any("gloo" in name for name in names), names
