"""Whether kernels run in Triton's interpreter, on a CPU."""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
