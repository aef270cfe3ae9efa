"""What the tests' launches share: one fork server, with everything imported that any of them runs."""

PRELOAD = ("foundry_moe.algorithm", "foundry_moe.models.mpt", "llmfoundry.command_utils", "foundry_moe.parallel.verify")
