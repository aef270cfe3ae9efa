"""The commands of `foundry-moe`: what each does, started by `cli.py`."""
