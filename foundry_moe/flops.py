"""Floating-point operations of training, for MFU and for `foundry-moe plan`. Imports neither torch nor Composer."""

from typing import Any


def training_flops(num_active_params: float, *, layers: int, width: int, sequence: int) -> float:
    """Of a token, forward and backward: 6 per parameter, and attention, not halved for causality, as torchtitan counts.

    Args:
        num_active_params: that a token is multiplied by, so without `looked_up_params`.
        layers: with attention.
        width: of the queries of all heads.
        sequence: tokens in a sequence.
    """
    return 6.0 * num_active_params + 12.0 * layers * width * sequence


def causal_lm(model: Any) -> Any:
    """The MPT or Hugging Face causal LM in a model of Composer, or the model itself; None if it is neither."""
    found = model if hasattr(model, "get_output_embeddings") else getattr(model, "model", None)
    config = getattr(found, "config", None)
    known = hasattr(config, "num_hidden_layers") or hasattr(config, "n_layers")
    return found if known and hasattr(found, "get_output_embeddings") else None


def num_layers(config: Any) -> int:
    """Layers, of a configuration of Hugging Face or MPT."""
    return int(getattr(config, "num_hidden_layers", None) or config.n_layers)


def query_width(config: Any) -> int:
    """Columns of the queries of all heads, of a configuration of Hugging Face or MPT."""
    heads = getattr(config, "num_attention_heads", None) or config.n_heads
    hidden = getattr(config, "hidden_size", None) or config.d_model
    # DeepSeek's head_dim is that of positions alone
    width = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or hidden // heads
    return int(heads * width)


def looked_up_params(model: Any) -> int:
    """Parameters of embeddings that are in no matrix product: of positions, and of tokens unless the head has them.

    Args:
        model: of `causal_lm`.
    """
    tokens, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is tokens.weight
    positions = getattr(getattr(model, "transformer", None), "wpe", None)  # MPT's and GPT-2's
    return (0 if tied else tokens.weight.numel()) + (0 if positions is None else positions.weight.numel())
