"""AdamW in one pass over each parameter, and Muon."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foundry_moe.optim.decoupled import DecoupledAdamWFused as DecoupledAdamWFused


if not TYPE_CHECKING:  # lazily: this one imports Composer, which Muon in another loop does not need

    def __getattr__(name: str) -> Any:
        if name == "DecoupledAdamWFused":
            from foundry_moe.optim.decoupled import DecoupledAdamWFused

            return DecoupledAdamWFused
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
