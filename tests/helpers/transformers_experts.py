"""Every experts class that the installed transformers 5 registers, small and random, and its difference from eager.

    python -m tests.helpers.transformers_experts [--device cuda] [--dtype bfloat16]    the docs' table

Classes are found by reading transformers' models, so that a new family is tested without being named here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from foundry_moe.integrations.transformers import NAME, is_fusable, register, way_of

EXPERTS, WIDTH, HIDDEN, TOKENS, CHOICES = 7, 32, 48, 21, 3
# attributes of configurations that are sizes; all others come from the family's own configuration
_SIZES = [
    (r"num_local_experts|num_experts|n_routed_experts|moe_num_experts", None),
    (r"hidden_size|moe_latent_size|d_model", WIDTH),
    (r"moe_intermediate_size|intermediate_size|expert_hidden_size|ffn_hidden_size|expert_ffn_hidden_size", HIDDEN),
]


@dataclass(frozen=True)
class Family:
    """One class: of `transformers.models.<model>`."""

    model: str
    experts: type[nn.Module]

    @property
    def flags(self) -> str:
        """What differs from a concatenated GLU without biases."""
        usual = {"has_gate": True, "is_concatenated": True}
        given = inspect.getclosurevars(self.experts.__init__).nonlocals
        flags = {name: value for name, value in given.items() if isinstance(value, bool)}
        assert len(flags) >= 4, flags  # five since has_post_expert_norm, which 5.17 does not have
        names = [
            name.removeprefix("has_").removeprefix("is_").replace("_", " ") if value else f"not {name[3:].lstrip('_')}"
            for name, value in sorted(flags.items())
            if value != usual.get(name, False)
        ]
        if "_apply_gate" in vars(self.experts) and self.experts._apply_gate.__module__ == self.experts.__module__:
            names.append("own gate")
        return ", ".join(names)


def families() -> list[Family]:
    """All decorated classes, by reading each `modeling_*.py` that has the decorator."""
    folder = Path(transformers.__file__).parent / "models"
    found = []
    for file in sorted(folder.glob("*/modeling_*.py")):
        if not re.search(r"^@use_experts_implementation", file.read_text(), re.MULTILINE):
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for thing in list(vars(module).values()):
            forward = getattr(thing, "forward", None)
            if getattr(thing, "__module__", "") == module.__name__ and "experts_interface" in getattr(
                getattr(forward, "__code__", None), "co_freevars", ()
            ):
                found.append(Family(file.parent.name, thing))
    return found


class _Small:
    """The family's own configuration with small sizes."""

    def __init__(self, config: Any, experts: int) -> None:
        self.__dict__.update(config=config, experts=experts)
        self._experts_implementation = "eager"

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["config"], name)
        sizes = [size or self.__dict__["experts"] for pattern, size in _SIZES if re.search(pattern, name)]
        return sizes[0] if sizes and (value is None or isinstance(value, (int, list))) else value


def _configuration(family: Family) -> Any:
    init = inspect.getclosurevars(family.experts.__init__).nonlocals["original_init"]
    read = set(re.findall(r"config\.(\w+)", inspect.getsource(init)))
    module = importlib.import_module(f"transformers.models.{family.model}.configuration_{family.model}")
    for kind in vars(module).values():
        if (
            inspect.isclass(kind)
            and issubclass(kind, transformers.PretrainedConfig)
            and kind.__module__ == module.__name__
        ):
            with contextlib.suppress(Exception):  # some configurations want arguments: another class of the file fits
                config = kind()
                if all(hasattr(config, name) for name in read):
                    return config
    raise LookupError(
        f"no configuration of {family.model} has {sorted(read)}: extend tests/helpers/transformers_experts.py"
    )


def build(
    family: Family, device: str = "cpu", dtype: torch.dtype = torch.float32, experts_of: int = EXPERTS
) -> nn.Module:
    """The experts with random weights."""
    experts = family.experts(_Small(_configuration(family), experts_of))
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return experts.to(device, dtype)


def inputs(experts: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, choices that leave expert 0 without a token, and combine weights."""
    width = experts.down_proj.shape[2 if experts.is_transposed else 1]
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(TOKENS, width, generator=generator)
    index_TK = torch.rand(TOKENS, EXPERTS - 1, generator=generator).argsort(1)[:, :CHOICES] + 1
    weights_TK = torch.rand(TOKENS, CHOICES, generator=generator)
    device, dtype = experts.down_proj.device, experts.down_proj.dtype
    return x_TD.to(device, dtype), index_TK.to(device), weights_TK.to(device)


def outputs(experts: nn.Module, implementation: str, given: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    """The output and the gradients of tokens, combine weights and every parameter."""
    experts.config._experts_implementation = implementation
    experts.zero_grad()
    x_TD, index_TK, weights_TK = given
    x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    y_TD = experts(x_TD, index_TK, weights_TK)
    y_TD.backward(torch.linspace(-1, 1, y_TD.numel(), device=y_TD.device).view(y_TD.shape).to(y_TD.dtype))
    found = {"output": y_TD.detach(), "tokens": x_TD.grad, "combine weights": weights_TK.grad}
    found |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    missing = [name for name, value in found.items() if value is None]
    assert not missing, f"no gradient: {missing}"
    return found  # type: ignore[return-value]


def differences(experts: nn.Module) -> dict[str, float]:
    """The largest difference from eager by tensor, relative to that tensor's largest value."""
    register()
    given = inputs(experts)
    ours, truth = (outputs(experts, implementation, given) for implementation in (NAME, "eager"))
    return {name: float((ours[name] - value).abs().max() / value.abs().max()) for name, value in truth.items()}


def rounding_errors(family: Family, device: str, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """By implementation (ours, eager, grouped_mm) and tensor: the norm of the error of 16-bit experts over the norm.

    The truth is eager in fp32 on the CPU, on the same 16-bit weights and tokens.
    """
    register()
    experts, exact = build(family, device, dtype), build(family)
    exact.load_state_dict(experts.state_dict())
    x_TD, *choices = given = inputs(experts)
    truth = outputs(exact, "eager", (x_TD.float().cpu(), *(tensor.cpu() for tensor in choices)))
    found = {name: outputs(experts, name, given) for name in (NAME, "eager", "grouped_mm")}
    return {
        implementation: {
            name: float((tensors[name].float().cpu() - value).norm() / value.norm()) for name, value in truth.items()
        }
        for implementation, tensors in found.items()
    }


def rows(device: str, dtype: torch.dtype, of: Sequence[Family] | None = None) -> Iterator[tuple[Family, str, float]]:
    """For each class the way of its experts, and `differences` in fp32, or the ratio of 16-bit errors to eager's."""
    for family in families() if of is None else of:
        if dtype is torch.float32:
            found = max(differences(build(family, device)).values())
        else:
            errors = rounding_errors(family, device, dtype)
            found = max(error / errors["eager"][name] for name, error in errors[NAME].items())
        yield family, way_of(build(family, device, dtype), dtype), found


def without_kernels(monkeypatch: Any) -> None:
    """Has everything computed in plain torch, also where Triton's interpreter would run kernels."""
    for module in ("foundry_moe.ops.expert_linear", "foundry_moe.integrations.transformers"):
        monkeypatch.setattr(f"{module}.blocksparse_available", lambda *_: False)


def table(of: Sequence[Family] | None = None) -> str:
    """Markdown: what the docs show. Figures are rounded up to a power of ten, so that they do not depend on the CPU."""
    lines = ["| transformers | class | flags | way on a GPU | within |", "|---|---|---|---|---|"]
    for family, _, largest in rows("cpu", torch.float32, of):
        within = next(bound for bound in ("1e-6", "1e-5", "1e-4", "1") if largest < float(bound))
        gpu = _way_on_gpu(family)
        lines.append(f"| {family.model} | {family.experts.__name__} | {family.flags} | {gpu} | {within} |")
    return "\n".join(lines)


def _way_on_gpu(family: Family) -> str:
    return "fused" if is_fusable(build(family)) else "split"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    if asked.device:
        for family, way, largest in rows(asked.device, getattr(torch, asked.dtype)):
            print(f"{family.model:24}{family.experts.__name__:32}{way:8}{largest:.1e}")
    else:
        print(table())
