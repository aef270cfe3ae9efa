"""Model entries for LLM Foundry, and how feed-forward blocks of known models are read."""
