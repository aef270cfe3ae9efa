"""Imports, once and without their warnings, what each child of a trial's fork server would spend seconds on.

Composer's Hugging Face wrapper looks through all causal language models of transformers for each model that it wraps.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import llmfoundry.command_utils  # noqa: F401
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    CAUSAL_MODELS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING.values())
