"""The loads that `callbacks.expert_load` writes: read from their file, and shown as a page. Imports no torch."""
