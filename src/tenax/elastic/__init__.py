"""Survivors: a worker that keeps its process and its memory when another one fails.

    from tenax import elastic

    state = elastic.State(model=model, optimizer=optimizer, step=0)
    for generation in elastic.generations():        # once per generation that this process takes part in
        with generation:                            # the end of the generation ends this block, then the loop continues
            dist.init_process_group("gloo")         # RANK, WORLD_SIZE and MASTER_* are this generation's
            generation.agree(state, restore=load)   # new ranks get the state of a rank that has it
            while state.step < steps:
                forward_and_backward(state.step)
                optimizer.step()                    # from here to completed() the block is not interrupted
                state.step += 1
                generation.completed(state.step)

For use inside workers. The dead worker is replaced; the others leave the block, wait, and take part in the next
generation at the same step. Without a launcher, and with one that knows nothing of this, the loop has one iteration,
and there is no thread and no signal handler.

Standard library only. torch is used if the script has imported it, and never imported here.
"""

from __future__ import annotations

from tenax.elastic._failures import GenerationEnded
from tenax.elastic._generation import Generation, critical, generations
from tenax.elastic._state import State
from tenax.elastic._torch import prepare_cuda

__all__ = ["Generation", "GenerationEnded", "State", "critical", "generations", "prepare_cuda"]
