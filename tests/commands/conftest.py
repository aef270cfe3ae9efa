"""The commands on checkpoints are tried on the same S3 server as the engine."""

from tests.checkpoint.conftest import moto

__all__ = ["moto"]
