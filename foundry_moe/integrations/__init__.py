"""Trainers and model libraries other than Composer and LLM Foundry, neither of which is imported here."""
