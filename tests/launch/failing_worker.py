"""The training script with a small program in place of training, which fails on some ranks."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time

from foundry_moe import train


def fail(arguments: list[str]) -> int:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    distributed.barrier()
    kind, ranks = sys.argv[1], [int(word) for word in sys.argv[2].split(",")]
    if rank in ranks:
        if kind == "signal":
            os.kill(os.getpid(), signal.SIGSEGV)
        atexit.register(linger)
        time.sleep(0.3 * ranks.index(rank))
        raise KeyError(f"planted on rank {rank}")
    distributed.all_reduce(torch.zeros(1))
    return 0


def linger() -> None:
    """Other ranks lose their connection before this process ends, as when loggers are closed."""
    from torch import distributed

    distributed.destroy_process_group()
    time.sleep(2)


if __name__ == "__main__":
    train.train = fail
    train.main()
