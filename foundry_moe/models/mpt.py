"""`model.name: dmoe_causal_lm`: an MPT whose feed-forward blocks are dMoE layers from the start."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict

from llmfoundry.models.mpt.configuration_mpt import MPTConfig
from llmfoundry.models.mpt.modeling_mpt import ComposerMPTCausalLM
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from foundry_moe.config import META_NEEDS_MESH, UPCYCLE_NEEDS_WEIGHTS, MoEConfig
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.experts import Experts
from foundry_moe.layers.gates.gate import Gate
from foundry_moe.layers.lookup import idle_parameters, moe_layers
from foundry_moe.layers.moe import MoELayer
from foundry_moe.models import loss_head
from foundry_moe.models.attention import sdpa_attention
from foundry_moe.models.conversion import apply_dmoe
from foundry_moe.schema import UserError, from_mapping

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

_ATTENTION = "sdpa"
_FUSED_LOSS = "fused_linear_crossentropy"
# Keys of a batch that MPT's forward pass takes
_INPUTS = ("input_ids", "attention_mask", "sequence_id", "inputs_embeds", "position_ids")


class DMoEMPTConfig(MPTConfig):
    """MPT's configuration, with `attn_impl: sdpa` allowed and the default."""

    def _validate_config(self) -> None:
        # To MPT, sdpa is its `torch` implementation: masks, biases and caches have the same form.
        attn_config: dict[str, Any] = dict(self.attn_config)  # type: ignore[has-type]
        if attn_config.setdefault("attn_impl", _ATTENTION) == _ATTENTION:
            attn_config["attn_impl"] = "torch"
            self.uses_sdpa = True
        self.attn_config = attn_config
        super()._validate_config()


class MPTKeys(TypedDict, total=False):
    """Keys of `mpt_causal_lm` and their types, for type checkers and completion; MPTConfig has the defaults."""

    tokenizer: Any
    use_train_metrics: bool
    additional_train_metrics: list[str] | None
    d_model: int
    n_heads: int
    n_layers: int
    head_dim: int | None
    expansion_ratio: int | float
    max_seq_len: int
    vocab_size: int
    resid_pdrop: float
    emb_pdrop: float
    learned_pos_emb: bool
    attn_config: dict[str, Any] | None
    ffn_config: dict[str, Any] | None
    init_device: str
    logit_scale: float | str | None
    no_bias: bool
    attention_bias: bool | None
    embedding_fraction: float
    norm_type: str
    norm_eps: float
    use_cache: bool
    init_config: dict[str, Any] | None
    fc_type: str | dict[str, Any]
    tie_word_embeddings: bool
    use_pad_tok_in_ffn: bool
    block_overrides: dict[str, Any] | None
    final_logit_softcapping: float | None


class DMoECausalLM(ComposerMPTCausalLM):
    """An MPT with dropless MoE layers; all keys of `mpt_causal_lm`, and `moe`, the keys of `algorithms.dmoe`.

    The FFN that `ffn_config` describes sets the experts' width and activation where `moe` has `auto`.

    Args:
        moe: a `MoEConfig`, or a mapping of its keys.
        loss_fn: fused_linear_crossentropy | torch_crossentropy | auto. The first computes the training loss without
            storing all logits, and needs a GPU and Liger-Kernel; `auto` uses it if possible. It is not possible with
            `use_train_metrics`, whose metrics read logits. Evaluation always has logits.

    Raises:
        ValueError: an invalid key or value of `moe` (`init: upcycle` has no weights to copy), no layer selected, or a
            fused loss that this model does not support.
    """

    def __init__(
        self, moe: MoEConfig | Mapping[str, Any] | None = None, loss_fn: str = "auto", **kwargs: Unpack[MPTKeys]
    ) -> None:
        config = moe if isinstance(moe, MoEConfig) else from_mapping(MoEConfig, moe, "model.moe")
        if config.init == "upcycle":
            raise UserError(UPCYCLE_NEEDS_WEIGHTS)
        kwargs["attn_config"] = {"attn_impl": _ATTENTION, **(kwargs.get("attn_config") or {})}
        fused = loss_fn in ("auto", _FUSED_LOSS)
        super().__init__(loss_fn="torch_crossentropy" if fused else loss_fn, **kwargs)
        self.fuses_loss = fused and self._can_fuse_loss(required=loss_fn == _FUSED_LOSS)
        if self.fuses_loss:
            loss_head.make_loss_head(self.model.get_output_embeddings())
        if getattr(self.config, "uses_sdpa", False):
            for module in self.model.modules():
                if getattr(module, "attn_impl", None) == "torch" and hasattr(module, "attn_fn"):
                    module.attn_fn = sdpa_attention
        apply_dmoe(self.model, config)

    @property
    def config_class(self) -> type[MPTConfig]:
        return DMoEMPTConfig

    @property
    def context(self) -> BatchContext:
        return moe_layers(self.model)[0].context

    def forward(self, batch: MutableMapping) -> Any:
        # A mask of ones has no effect, and without it attention uses torch's flash kernels. MPT reads the mask on the
        # host anyway, to refuse padding on the left.
        mask = batch.get("attention_mask")
        if mask is not None and bool(mask.all()):
            batch = {**batch, "attention_mask": None}
        labels = batch.get("labels")
        if not (self.fuses_loss and self.training and labels is not None and loss_head.runs_on(labels.device)):
            return super().forward(batch)
        head = self.model.get_output_embeddings()
        head.targets = self._targets(batch)
        try:
            # not by super().forward, which searches the entry points of all installed packages: 1 ms at every step
            outputs = self.model(**{name: batch.get(name) for name in _INPUTS})
        finally:
            head.targets = None
        return CausalLMOutputWithPast(loss=outputs.logits)

    def _targets(self, batch: Mapping) -> Tensor:
        return self.get_targets(batch) if self.shift_labels else batch["labels"]

    def loss(self, outputs: Any, batch: Mapping) -> Any:
        # not by super().loss, which waits for the device, and searches the entry points of all installed packages
        targets, summed = self._targets(batch), outputs.loss
        if outputs.logits is not None:
            summed = self.loss_fn(outputs.logits.flatten(0, -2), targets.flatten()).sum()
        loss = summed / (targets != loss_head.IGNORED).sum().clamp(min=1)
        return self.context.track_scale(loss, targets)

    def _can_fuse_loss(self, *, required: bool) -> bool:
        if not loss_head.is_installed():
            reason = "needs Liger-Kernel: pip install liger-kernel"
        elif self.train_metrics:
            reason = "computes no logits, which model.use_train_metrics (true) reads: set it to false"
        elif self.model.logit_scale is not None or self.model.final_logit_softcapping is not None:
            reason = "does not support model.logit_scale and model.final_logit_softcapping"
        else:
            return True
        if required:
            raise UserError(f"model.loss_fn ({_FUSED_LOSS}) {reason}; or use loss_fn: torch_crossentropy")
        return False

    @cached_property
    def n_active_params(self) -> int:
        """Parameters that a token passes through: of a layer's experts, `top_k`. For the speed monitor's MFU."""
        return super().n_active_params - idle_parameters(self.model)


def init_moe_module(module: nn.Module, **_: Any) -> bool:
    """LLM Foundry's hook for initial weights; True if the module belongs to an MoE layer, so MPT must not draw it."""
    if isinstance(module, MoELayer):
        module.reset_parameters()
        return True
    # The layer draws its parts. A sharded part comes from the meta device, where Composer calls this for parts only; on
    # a mesh, `parallelize` has drawn it before.
    ours = isinstance(module, Experts | Gate)
    if ours and any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
        raise UserError(META_NEEDS_MESH)
    return ours
