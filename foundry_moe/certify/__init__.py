"""Certificates for any PyTorch trainer: a recorder of training steps, and the comparison of two records.

    from foundry_moe.certify import Recorder

    recorder = Recorder(model, optimizer, "records/two_ranks")  # before the first step, on every rank
    ...
    recorder.batch(loss)  # after each backward pass, before clipping; optional

    foundry-moe certify records/one_rank records/two_ranks

Needs torch alone; knows no trainer and no model of this package.
"""

from foundry_moe.certify.checkpoint import StoredTensors, compare_checkpoint, stored_by_dcp, stored_in_safetensors
from foundry_moe.certify.compare import Report, compare
from foundry_moe.certify.record import Record, read_record
from foundry_moe.certify.recorder import Box, Recorder

__all__ = [
    "Box",
    "Record",
    "Recorder",
    "Report",
    "StoredTensors",
    "compare",
    "compare_checkpoint",
    "read_record",
    "stored_by_dcp",
    "stored_in_safetensors",
]
