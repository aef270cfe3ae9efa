"""The experts of a layer: weights and their computation. Independent of gates and ranks; E may be global or local.

Shapes: Q rows received, K choices, D model width, F expert width, E experts, H widths of all experts added up, L rank
of LoRA adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from foundry_moe.config import ACTIVATIONS, LoRAConfig
from foundry_moe.layers.context import unchanged
from foundry_moe.layers.dispatch import Dispatched, Parts
from foundry_moe.layers.init import normal_matrix, residual_std
from foundry_moe.layers.rounds import compute_in_rounds
from foundry_moe.ops import POINTWISE, Biases, expert_mlp
from foundry_moe.ops.lora import Adapter, Adapters


class ExpertsBase(nn.Module):
    """Settings and state of experts, for every layout of their weights.

    Args:
        activation: a name in `foundry_moe.config.ACTIVATIONS`.
        num_layers: layers of the model, for the scale of `w2` (see `residual_std`).

    `most_rounds`: the most rounds that a call has taken since this was set to one (see `layers/rounds.py`).
    `local` turns a parameter into the tensor to compute with: itself, or what placement on a mesh sets here.
    """

    def __init__(
        self, *, activation: str, num_layers: int, init_std: float = 0.02, backend: str = "auto", memory: str = "save"
    ) -> None:
        super().__init__()
        self.activation, self.gated = ACTIVATIONS[activation].pointwise, ACTIVATIONS[activation].gated
        self.backend, self.memory = backend, memory
        self.init_std, self.num_layers = init_std, num_layers
        self.local: Callable[[Tensor], Tensor] = unchanged
        self.most_rounds = 1

    def draw_(self, name: str, local: Tensor, rows: range, columns: range, *, seed: int, layer: int) -> None:
        """Fills `local` with the initial values of a part of the parameter `name`: of its first two dimensions."""
        raise NotImplementedError

    def reset_parameters(self, *, seed: int, layer: int) -> None:
        """Draws all experts. For parameters that are whole on this process."""
        for name, parameter in self.named_parameters():
            rows, columns = (range(size) for size in parameter.shape[:2])
            self.draw_(name, parameter, rows, columns, seed=seed, layer=layer)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Every tensor that may need a gradient: w1, v1 and w2 first."""
        raise NotImplementedError

    def options(self, *tensors: Any) -> dict[str, Any]:
        """What `expert_mlp` needs beside three weights and the settings here, from the other ones of `tensors`."""
        raise NotImplementedError

    def forward(self, rows: Dispatched) -> Dispatched:
        """Receives rows, computes the experts, and starts to send results back; in rounds, part by part.

        Rounds are one call too, so that FSDP2, which wraps this module where tokens are sent, gathers its weights once.
        """
        tensors = self.tensors()
        if rows.parts is not None:
            self.most_rounds = max(self.most_rounds, len(rows.parts.tokens))
            return Dispatched(self._in_rounds(rows, rows.parts, tensors))
        rows = rows.receive()
        y_QD = expert_mlp(*self.operands(rows, tensors), **self.settings(*tensors[3:]))
        return rows.send_back(y_QD)

    def operands(self, rows: Dispatched, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """The first arguments of `expert_mlp`."""
        w1, v1, w2 = tensors[:3]
        # FSDP2 casts no inputs of experts, so rows are cast here outside autocast
        x_QD = rows.x if torch.is_autocast_enabled(rows.x.device.type) else rows.x.to(w1.dtype)
        return x_QD, rows.weights, rows.plan, w1, v1, w2

    def settings(self, *tensors: Any) -> dict[str, Any]:
        """The other arguments of `expert_mlp`."""
        given = {"activation": self.activation, "backend": self.backend, "memory": self.memory}
        return {**given, **self.options(*tensors)}

    def _in_rounds(self, rows: Dispatched, parts: Parts, tensors: tuple[Tensor | None, ...]) -> Tensor:
        """y_TD."""
        dispatcher = parts.dispatcher
        assert rows.weights is not None

        def compute_round(number: int, x_TD: Tensor, weights_TK: Tensor, *tensors: Tensor | None) -> Tensor:
            received = dispatcher.dispatch(x_TD, parts.choices(number, weights_TK), part=number).receive()
            y_QD = expert_mlp(*self.operands(received, tensors), **self.settings(*tensors[3:]))
            return dispatcher.combine(received.send_back(y_QD))

        return compute_in_rounds(compute_round, parts.tokens, rows.x, rows.weights, tensors)


def adapters_on() -> bool:
    return True


class Experts(ExpertsBase):
    """E MLPs or GLUs: w1_EFD (the gate projection of a GLU), v1_EFD (the up projection; None for an MLP), w2_EDF.

    Args:
        bias: add biases to all projections: w1_bias_EF, v1_bias_EF (of a GLU), w2_bias_ED. They begin at zero.
        lora: adapters beside the weights, which are frozen: w1_A_EDL (transposed) and w1_B_EFL, v1_A_EDL and v1_B_EFL,
            w2_A_EFL and w2_B_EDL, in fp32 or better. The rows of both are those of weights, for placement to cut.
        Others as those of `ExpertsBase`.

    `adapters_enabled`: whether `lora` is computed; see `models/adapters.py`, which sets it.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        d_model: int,
        hidden_size: int,
        activation: str,
        bias: bool = False,
        lora: LoRAConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(activation=activation, **settings)

        def new(*sizes: int, dtype: torch.dtype | None = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *sizes, device=device, dtype=dtype))

        self.w1_EFD = new(hidden_size, d_model)
        self.v1_EFD = new(hidden_size, d_model) if self.gated else None
        self.w2_EDF = new(d_model, hidden_size)
        self.w1_bias_EF = new(hidden_size) if bias else None
        self.v1_bias_EF = new(hidden_size) if bias and self.gated else None
        self.w2_bias_ED = new(d_model) if bias else None
        self.lora = lora
        self.adapters_enabled: Callable[[], bool] = adapters_on
        self.adapter_names: dict[str, tuple[str, str]] = {}
        if lora is not None:
            self.requires_grad_(False)
            precise = torch.promote_types(self.w1_EFD.dtype, torch.float32)
            for target in lora.targets_of(activation):
                inputs, outputs = ("F", "D") if target == "w2" else ("D", "F")
                names = f"{target}_A_E{inputs}L", f"{target}_B_E{outputs}L"
                for name, axis in zip(names, (inputs, outputs), strict=True):
                    size = d_model if axis == "D" else hidden_size
                    self.register_parameter(name, new(size, lora.r, dtype=precise))
                self.adapter_names[target] = names

    def extra_repr(self) -> str:
        """Sizes and backend for `print(model)`; parameters of FSDP2 show the sizes of the whole layer."""
        num_experts, hidden_size, d_model = self.w1_EFD.shape
        gated = "" if self.v1_EFD is None else ", gated"
        lora = "" if self.lora is None else f", lora r={self.lora.r} of {', '.join(self.adapter_names)}"
        return f"{num_experts} experts, {d_model} -> {hidden_size} -> {d_model}{gated}{lora}, backend={self.backend}"

    def rows_of(self, experts: range) -> range:
        """The indices of consecutive experts along a parameter's first dimension."""
        return experts

    def initial(self, name: str, expert: int, *, seed: int, layer: int, device: torch.device) -> Tensor:
        """The initial fp32 matrix of one global expert, for example `w1_EFD` -> [F, D]; a shard is a slice of it."""
        shape = tuple(self.get_parameter(name).shape[1:])
        if "_bias_" in name or "_B_" in name:
            return torch.zeros(shape, device=device)
        std = residual_std(self.init_std, self.num_layers) if name == "w2_EDF" else self.init_std
        if "_A_" in name:
            std = (3 * shape[0]) ** -0.5  # the variance of peft's uniform distribution
        return normal_matrix(shape, std, seed=seed, layer=layer, name=name, expert=expert, device=device)

    @torch.no_grad()
    def draw_(self, name: str, local: Tensor, rows: range, columns: range, *, seed: int, layer: int) -> None:
        """See `ExpertsBase`. Rows are experts, columns the rows of their matrices."""
        for expert, part in zip(rows, local, strict=True):
            whole = self.initial(name, expert, seed=seed, layer=layer, device=local.device)
            part.copy_(whole[columns.start : columns.stop])

    def tensors(self) -> tuple[Tensor | None, ...]:
        here = [self.w1_EFD, self.v1_EFD, self.w2_EDF, self.w1_bias_EF, self.v1_bias_EF, self.w2_bias_ED]
        if self.adapter_names:
            here += [self.get_parameter(name) for names in self.adapter_names.values() for name in names]
        if self.local is unchanged:
            return tuple(here)
        return tuple([None if weight is None else self.local(weight) for weight in here])

    def options(self, *tensors: Any) -> dict[str, Any]:
        """Biases and adapters."""
        w1_bias_EF, v1_bias_EF, w2_bias_ED, *factors = tensors
        adapters = biases = None
        if self.lora is not None and self.adapters_enabled():
            pairs = map(Adapter, factors[::2], factors[1::2])
            by_target = {"w1": None, "v1": None, "w2": None, **dict(zip(self.adapter_names, pairs, strict=True))}
            dropout = self.lora.dropout if self.training else 0.0
            adapters = Adapters(**by_target, scale=self.lora.scale, dropout=dropout)
        if w1_bias_EF is not None and w2_bias_ED is not None:
            biases = Biases(w1_EF=w1_bias_EF, v1_EF=v1_bias_EF, w2_ED=w2_bias_ED)
        return {"biases": biases, "adapters": adapters}


class MixedExperts(ExpertsBase):
    """MLPs or GLUs: w1_HD, v1_HD (None for an MLP) and w2_HD, whose row j is what hidden unit j adds to the output.

    Args:
        widths: of each expert, in order; their rows lie in this order, those of expert i before `ends[i + 1]`.
        Others as those of `ExpertsBase`.

    `held`: the experts whose rows this process has: all, or what placement on a mesh sets here.
    """

    def __init__(
        self,
        *,
        widths: tuple[int, ...],
        d_model: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.widths = widths
        self.ends = [0, *accumulate(widths)]
        self.held = range(len(widths))
        shape = (sum(widths), d_model)
        self.w1_HD = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.v1_HD = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if self.gated else None
        self.w2_HD = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):  # torch's, beside the keys
            destination._metadata[prefix[:-1]]["widths"] = self.widths

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        """Reports other widths of the same sum, whose tensors have the same shapes, as torch reports other shapes."""
        if (widths := local_metadata.get("widths", self.widths)) == self.widths:
            return super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        rest[-1].append(f"{prefix[:-1]} has experts of widths {self.widths}, and the state dict of {widths}")

    def rows_of(self, experts: range) -> range:
        """The rows of consecutive experts."""
        return range(self.ends[experts.start], self.ends[experts.stop])

    def initial(self, name: str, expert: int, *, seed: int, layer: int, device: torch.device) -> Tensor:
        """The initial fp32 rows [F, D] of one expert: the numbers that `Experts` of one width F draw for it."""
        width, d_model = self.widths[expert], self.w1_HD.shape[1]
        stream: dict[str, Any] = {"seed": seed, "layer": layer, "expert": expert, "device": device}
        if name == "w2_HD":
            std = residual_std(self.init_std, self.num_layers)
            return normal_matrix((d_model, width), std, name="w2_EDF", **stream).T
        return normal_matrix((width, d_model), self.init_std, name=name.replace("_HD", "_EFD"), **stream)

    @torch.no_grad()
    def draw_(self, name: str, local: Tensor, rows: range, columns: range, *, seed: int, layer: int) -> None:
        for expert, (start, stop) in enumerate(pairwise(self.ends)):
            first, last = max(start, rows.start), min(stop, rows.stop)
            if first < last:
                whole_FD = self.initial(name, expert, seed=seed, layer=layer, device=local.device)
                part = whole_FD[first - start : last - start, columns.start : columns.stop]
                local[first - rows.start : last - rows.start].copy_(part)

    def tensors(self) -> tuple[Tensor | None, ...]:
        weights = (self.w1_HD, self.v1_HD, self.w2_HD)
        return tuple(None if weight is None else self.local(weight) for weight in weights)

    def options(self, *tensors: Any) -> dict[str, Any]:
        """The widths of the experts here."""
        return {"widths": self.widths[self.held.start : self.held.stop]}


class SharedExpert(nn.Module):
    """One dense FFN that every token passes through beside its experts (Dai et al. 2024, DeepSeekMoE, section 3.2).

    Args:
        gated: multiply its output by sigmoid(x w), as Qwen2-MoE does.
    """

    def __init__(
        self,
        *,
        d_model: int,
        hidden_size: int,
        activation: str,
        num_layers: int,
        init_std: float = 0.02,
        gated: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind = ACTIVATIONS[activation]
        self.act = POINTWISE[kind.pointwise]
        self.std = {"w1": init_std, "v1": init_std, "w2": residual_std(init_std, num_layers), "gate": init_std}
        self.w1 = nn.Linear(d_model, hidden_size, bias=False, device=device, dtype=dtype)
        self.v1 = nn.Linear(d_model, hidden_size, bias=False, device=device, dtype=dtype) if kind.gated else None
        self.w2 = nn.Linear(hidden_size, d_model, bias=False, device=device, dtype=dtype)
        self.gate = nn.Linear(d_model, 1, bias=False, device=device, dtype=dtype) if gated else None

    @torch.no_grad()
    def reset_parameters(self, *, seed: int, layer: int) -> None:
        for name, linear in self.named_children():
            assert isinstance(linear, nn.Linear)
            shape, device = linear.weight.shape, linear.weight.device
            stream = f"shared.{name}"
            linear.weight.copy_(
                normal_matrix(shape, self.std[name], seed=seed, layer=layer, name=stream, device=device)
            )

    def forward(self, x_TD: Tensor) -> Tensor:
        h_TF = self.act(self.w1(x_TD))
        if self.v1 is not None:
            h_TF = h_TF * self.v1(x_TD)
        y_TD = self.w2(h_TF)
        return y_TD if self.gate is None else self.gate(x_TD).sigmoid() * y_TD
