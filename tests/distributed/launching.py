"""What the tests' launches share: one fork server, with everything imported that any of them runs.

The first launch settles it for all: every test that launches must name this, or each process imports Composer anew.
"""

PRELOAD = (
    "foundry_moe.algorithms.dmoe",
    "foundry_moe.models.mpt",
    "llmfoundry.command_utils",
    "foundry_moe.commands.verify",
)
