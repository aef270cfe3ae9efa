"""A small process in place of training, for tests of launchers: it saves for a second when it gets a signal."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKER = """
import os, signal, sys, time
from pathlib import Path
folder, rank, kind = Path(sys.argv[2].partition("=")[2]), os.environ["RANK"], sys.argv[3].partition("=")[2]
def stop(number, frame):
    (folder / f"signal-{rank}").write_text(signal.Signals(number).name)
    time.sleep(60.0 if kind == "slow" else 1.0)  # the save
    (folder / f"saved-{rank}").touch()
    sys.exit(75)
for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
    signal.signal(signal.Signals[name], stop)
(folder / f"life-{rank}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}").touch()
if kind == "early":  # before handlers are installed
    for name in ("SIGTERM", "SIGUSR1"):
        signal.signal(signal.Signals[name], signal.SIG_DFL)
    if rank == "1":
        os.kill(os.getpid(), signal.SIGTERM)
if kind.isdigit() and rank == "1":
    time.sleep(1.0)
    os._exit(int(kind))
time.sleep(600)
"""
