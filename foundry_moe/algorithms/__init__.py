"""Composer algorithms: MoE layers in place of FFNs, their mesh, and the schedule of their gates."""
