"""The loads of experts over time: a file of JSON lines, and which layers collapse onto few experts.

Shapes: L MoE layers, E experts.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor

from foundry_moe.loads.history import collapse_entropy

PATIENCE = 2  # looks in a row


class LoadFile:
    """One JSON object per line: `{"batch": 20, "top_k": 2, "loads": {"0": [of each expert], ...}, "metrics": {...}}`.

    A resumed run appends to the file of the run before; lines of batches that it repeats are dropped.

    Attributes:
        start: batches before the first that this run counts; None = those before its first line.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser()
        self.start: int | None = None
        self._opened = False

    def add(self, batch: int, names: list[int], counts_LE: Tensor, metrics: dict[str, float], *, top_k: int) -> None:
        """Appends a line. `names`: the layers' indices."""
        if not self._opened:
            self._keep_before(batch if self.start is None else self.start + 1)
            self._opened = True
        loads = {str(name): counts_E for name, counts_E in zip(names, counts_LE.tolist(), strict=True)}
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with self.path.open("a") as file:
            file.write(json.dumps({"batch": batch, "top_k": top_k, "loads": loads, "metrics": finite}) + "\n")

    def _keep_before(self, batch: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        rest = self.path.with_name(self.path.name + ".part")
        with self.path.open() as old, rest.open("w") as new:
            new.writelines(line for line in old if (_batch_of(line) or math.inf) < batch)
        rest.replace(self.path)


def _batch_of(line: str) -> float | None:
    """None for a line of another kind, or an incomplete one."""
    try:
        value: Any = json.loads(line)["batch"]
    except (ValueError, TypeError, KeyError):
        return None
    return value if isinstance(value, int) else None


class CollapseWatch:
    """Finds layers whose loads stay on few experts."""

    def __init__(self) -> None:
        self._low: Counter[int] = Counter()  # by layer, looks in a row

    def look(self, names: list[int], counts_LE: Tensor, entropy_L: list[float], *, top_k: int) -> list[str]:
        """A sentence for each layer that has just been found to collapse; another only once it has recovered.

        Args:
            names: the layers' indices.
            entropy_L: `load_entropy` of each layer's loads.
        """
        said = []
        for name, counts_E, evenness in zip(names, counts_LE, entropy_L, strict=True):
            low = evenness < collapse_entropy(len(counts_E), top_k)
            self._low[name] = self._low[name] + 1 if low else 0
            if self._low[name] == PATIENCE:
                dead = int((counts_E == 0).sum())
                said.append(
                    f"layer {name} collapses onto few of its {len(counts_E)} experts: the entropy of its loads is "
                    f"{evenness:.2f} (1 = even), {dead} experts have no tokens: raise loss.balance or lower the "
                    "learning rate"
                )
        return said
