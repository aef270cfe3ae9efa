"""Prepares multiprocessing's fork server for runs of LLM Foundry: the last module that it imports.

Each forked process would else take 1.2 s to ask for the CPU's model, and 0.3 s per collection of what imports created.
"""

from __future__ import annotations

from foundry_moe.launch.fork_server import freeze, import_modules

import_modules()
freeze()
