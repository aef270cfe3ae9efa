"""A trained model in the names, layouts and configuration of a Hugging Face family: how it leaves."""
