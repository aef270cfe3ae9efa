"""Scripts for claims of papers; docs/explanation/papers.md has the results."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for modules of benchmarks/, which are scripts
