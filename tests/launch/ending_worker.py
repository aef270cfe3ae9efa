"""The training script, and last of all at exit a line that says whether the process group is still there."""

from __future__ import annotations

import atexit

from torch import distributed

from foundry_moe.train import main

atexit.register(lambda: print(f"process group at exit: {distributed.is_initialized()}", flush=True))

if __name__ == "__main__":
    main()
