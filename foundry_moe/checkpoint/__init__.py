"""Elastic checkpoints: written by all ranks in the background, committed as one, read back on any mesh.

`engine.CheckpointEngine` is the core and knows neither Composer nor a schedule; `callbacks.elastic_checkpoint` is
Composer's callback. Nothing is imported here, so that looking up one name costs nothing.
"""
