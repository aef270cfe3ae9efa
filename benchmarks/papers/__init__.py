"""Claims of papers and issues that this project stands on, each rerun by one command: see docs/papers.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks that these scripts share
