"""JAX with several processes, and a checkpoint in one file.

tenax run --nnodes 2 --nproc-per-node 2 --max-restarts 3 with_jax.py /shared/folder
"""

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from task import Samples, fingerprint

from tenax import progress
from tenax.data import ResumableBatches
from tenax.store import TCPStore
from tenax.utils.distributed import get_free_port

EPOCHS, BATCH, SAVE_EVERY = 2, 48, 4  # BATCH: the samples of one step of all ranks
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def connect() -> None:
    """Rank 0 chooses a port for JAX's coordinator. MASTER_PORT is that of the store."""
    host = os.environ["MASTER_ADDR"]
    store = TCPStore(host, int(os.environ["MASTER_PORT"]))
    if RANK == 0:
        store.set("jax", f"{host}:{get_free_port()}")
    jax.distributed.initialize(store.get("jax").decode(), WORLD_SIZE, RANK)


def loss(weights: dict, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(inputs @ weights["hidden"] + weights["bias"])
    return jnp.mean((hidden @ weights["output"] - targets) ** 2)


@jax.jit
def train_step(weights: dict, inputs: jax.Array, targets: jax.Array) -> dict:
    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, jax.grad(loss)(weights, inputs, targets))


def main(checkpoint: Path) -> None:
    mesh = Mesh(jax.devices(), "ranks")
    replicated, by_rank = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("ranks"))
    first, second = jax.random.split(jax.random.key(0))
    weights = {
        "hidden": jax.random.normal(first, (8, 32)) / 3,
        "bias": jnp.zeros(32),
        "output": jax.random.normal(second, (32, 1)) / 6,
    }
    epoch = step = 0
    if checkpoint.exists():  # all ranks see the same file: it is replaced only after a step that all have made
        state = dict(numpy.load(checkpoint))
        epoch, step = int(state.pop("epoch")), int(state.pop("step"))
        weights = state
        print(f"resumed at epoch {epoch}, step {step}")
    weights = jax.device_put(weights, replicated)
    dataset = Samples()
    batches = ResumableBatches(len(dataset), BATCH)
    while epoch < EPOCHS:
        batches.resume(epoch, step)
        for indices in batches:
            inputs, targets = map(numpy.stack, zip(*(dataset[index] for index in indices), strict=True))
            shared = [jax.make_array_from_process_local_data(by_rank, part) for part in (inputs, targets)]
            weights = jax.block_until_ready(train_step(weights, *shared))
            step += 1
            progress.step(epoch * batches.steps + step)
            if step % SAVE_EVERY == 0 and RANK == 0:
                save({**weights, "epoch": epoch, "step": step}, checkpoint)
        epoch, step = epoch + 1, 0
    if RANK == 0:
        print("trained:", fingerprint(jax.tree.leaves(jax.device_get(weights))))


def save(state: dict, path: Path) -> None:
    """Replace the checkpoint atomically: a worker that is killed while it writes leaves the previous one."""
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        numpy.savez(file, **state)
    os.replace(new, path)


if __name__ == "__main__":
    connect()
    main(Path(sys.argv[1]) / "checkpoint.npz")
    jax.distributed.shutdown()
