"""Exports a trained model in the names, layouts and configuration of a Hugging Face family."""
