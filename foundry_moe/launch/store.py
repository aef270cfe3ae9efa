"""Serves the store of torchrun's rendezvous from a machine that has no part in the run: `python -m ... [PORT]`.

On node 0, where torchrun starts it otherwise, it ends with that node, and the run with it. It holds some kilobytes a
node and needs one core. Agents use it with `--rdzv-conf is_host=false` (`STORE` of `docker/entrypoint.sh`). When this
process ends, all agents end within seconds, and the cluster starts them again.
"""

from __future__ import annotations

import signal
import sys

from torch.distributed import TCPStore

STOPS = (signal.SIGTERM, signal.SIGINT)


def serve(port: int) -> None:
    """Serves until SIGTERM or SIGINT."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # before the store starts its threads
    store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False, multi_tenant=True)
    print(f"store: serving port {store.port}", flush=True)
    signal.sigwait(STOPS)


if __name__ == "__main__":
    serve(int(sys.argv[1]) if len(sys.argv) > 1 else 29500)
