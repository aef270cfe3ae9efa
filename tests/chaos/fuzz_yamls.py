"""Edits the runs of `yamls/` at random and asks `foundry-moe check`: `python -m tests.chaos.fuzz_yamls --cases 10000`.

*Right*: edits that keep a run right must be accepted. *Wrong*: one edit that is known to be wrong, among right ones,
must be refused with exit code 2 and one line. *Any* and *torn*: values and keys, or bytes of the file, are replaced
blindly; whatever the answer, it is `ok` or one line. A traceback is a failure in all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from foundry_moe.cli import main as command
from foundry_moe.launch.user_errors import USER_ERROR

ROOT = Path(__file__).parents[2]
# the edits below are right or wrong for an MPT that trains
YAMLS = sorted(path for path in (ROOT / "yamls").rglob("*.yaml") if path.parent.name not in ("eval", "finetune"))
Run = dict[str, Any]
Edit = Callable[[random.Random, Run], None]

# places whose keys are all known, so that another key is a mistake
CLOSED = (
    (),
    ("model",),
    ("model", "moe"),
    ("model", "moe", "gate"),
    ("model", "moe", "mesh"),
    ("model", "attn_config"),
    ("model", "init_config"),
    ("optimizer",),
    ("scheduler",),
    ("train_loader",),
    ("train_loader", "dataset"),
    ("fsdp_config",),
    ("algorithms", "gradient_clipping"),
    ("callbacks", "elastic_checkpoint"),
    ("callbacks", "expert_load"),
    ("callbacks", "speed_monitor"),
)
JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 10**30, 0.5, -0.0, float("nan"), float("inf"), "", "auto", "text", "${nope}", "${seed}",
    "²", "1e400", "../x", [], [None], [[]], [1, 2], {}, {"name": None}, {"name": "x"}, {1: 2}, {"a": {"b": []}}, "\n",
)  # fmt: skip
BAD_VALUES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("max_seq_len", (1, 0, -4, "abc", None, 2.5, [256])),
    ("global_train_batch_size", (0, -1, "x", None, 1.5)),
    ("device_train_microbatch_size", (0, -2, "many", None, [])),
    ("max_duration", ("10", 10, "ten", "0ba", -1, None, "5xx", [], "0.5ep")),
    ("precision", ("amp_fp8", "bf17", "fp64", None, 16)),
    ("seed", (-1, "x", None, 1.5)),
    ("eval_interval", ("often", -1, {})),
    ("model", (None, 3, "mpt", [])),
    ("model.name", (None, "dmoe_causal", "mpt", 7)),
    ("model.d_model", (0, -8, "wide", 1.5, True)),
    ("model.n_heads", (0, 7, 5, "many")),
    ("model.n_layers", (0, -1, "deep", 2.5)),
    ("model.vocab_size", (0, -1, "x")),
    ("model.max_seq_len", (1, 0, "x")),
    ("model.norm_type", ("rms", "batchnorm", 3)),
    ("model.init_device", ("gpu", "cuda:0", 1)),
    ("model.resid_pdrop", (1.5, -0.1, "x")),
    ("model.loss_fn", ("crossentropy",)),
    ("model.attn_config", (3, "rope", [])),
    ("model.attn_config.attn_impl", ("tritn", "flsh")),
    ("model.attn_config.attn_type", ("multihead",)),
    ("model.init_config.name", ("baseline",)),
    ("model.moe.num_experts", (0, -1, "x", 2.5, None)),
    ("model.moe.top_k", (0, 1000, "x")),
    ("model.moe.activation", ("swiglue", 3)),
    ("model.moe.layers", ([99], "some", {"every": 0}, {"every": 99}, [])),
    ("model.moe.gate", ("topk", {}, {"name": "topq"}, {"name": "switch", "jitter": 2}, {"name": "topk", "scale": 0})),
    ("model.moe.loss", ({"balanse": 0.1}, {"balance": -1}, 0.1)),
    ("model.moe.capacity", (0, -1, "some")),
    ("model.moe.init", ("upcycle", "zeros")),
    ("model.moe.mesh", ({"expert": 0}, {"expert": 7}, {"shard": "all"}, {"exprt": 2}, 8)),
    ("optimizer", (None, 3, {})),
    ("optimizer.name", ("adamw", "decoupled_adam", None)),
    ("optimizer.lr", (-1.0, "high", [1], float("nan"))),
    ("optimizer.betas", ([0.9], [0.9, 1.0], 0.9, ["a", "b"])),
    ("optimizer.param_groups", ([{"lr": 1.0}], [3], {"lr": 1.0}, [{"param_str_match": "(", "lr": 1.0}])),
    ("optimizer.disable_grad", ("(", [3], {"a": 1})),
    ("scheduler.name", ("cosine", None)),
    ("scheduler.t_warmup", ("soon", -1, {})),
    ("train_loader", (None, [], "text")),
    ("train_loader.name", ("txt", None)),
    ("train_loader.num_workers", (-1, "x")),
    ("train_loader.dataset.max_seq_len", (10**6, 0, 1)),
    ("fsdp_config", (3, "full", [1])),
    ("tp_config", ({"strategy": "ffn", "tensor_parallel_degree": 2},)),
    ("algorithms", ([], {"dmoo": {}}, {"gradient_clipping": {"clipping_type": "norm"}}, {"dmoe": {"num_experts": 4}})),
    ("algorithms.gradient_clipping", ({"clipping_type": "nrm", "clipping_threshold": 1.0}, 3)),
    ("callbacks", ([], {"speed_monitr": {}}, {"elastic_checkpoint": {}})),
    ("callbacks.elastic_checkpoint", ({"folder": "x", "keep": 0}, {"folder": "x", "interval": "often"}, {"keep": 2})),
    ("callbacks.expert_load", ({"interval": "x"}, {"shars": True}, 3)),
    ("loggers", ({"wandbb": {}}, [], {"wandb": {"projct": "x"}})),
)
NEEDED = (
    "model", "tokenizer", "optimizer", "scheduler", "train_loader", "max_duration", "max_seq_len",
    "global_train_batch_size", "device_train_microbatch_size", "model.name", "model.moe.num_experts", "optimizer.name",
    "scheduler.name", "scheduler.t_warmup", "train_loader.name",
)  # fmt: skip
GOOD_VALUES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("optimizer", ({"name": "decoupled_lionw", "lr": 1e-4}, {"name": "decoupled_adamw_fused", "lr": 0.0, "eps": 1e-8})),
    ("optimizer.lr", (1e-5, 1, 3.0e-3)),
    ("optimizer.disable_grad", ("wte", ["norm", "experts"])),
    ("optimizer.param_groups", ([{"param_str_match": "norm", "lr": 1e-4, "weight_decay": 0.0}],)),
    (
        "scheduler",
        (
            {"name": "constant_with_warmup", "t_warmup": "10ba"},
            {"name": "inv_sqrt_with_warmup", "t_warmup": "10ba", "t_scale": "10ba", "t_cooldown": "10ba"},
        ),
    ),
    ("max_duration", ("10_000ba", "2e5ba")),  # in the unit of every t_warmup
    ("eval_interval", (0, 1, "10ba", "1ep")),
    ("seed", (0, 1, 4294967295)),
    ("precision", ("fp32", "amp_bf16", "amp_fp16")),
    ("model.norm_type", ("layernorm", "rmsnorm")),
    ("model.resid_pdrop", (0, 0.1)),
    ("model.logit_scale", (0.5, "inv_sqrt_d_model", None)),
    ("model.moe.gate", ({"name": "topk", "score": "sigmoid"}, {"name": "topk", "jitter": 0.1, "bias_balance": True})),
    ("model.moe.loss", ({}, {"balance": 0.1}, "auto")),
    ("model.moe.capacity", (None, 1.25)),
    ("model.moe.layers", ("all", {"every": 2}, [0, 1])),
    ("model.moe.top_k", (1, 2)),
    ("model.moe.memory", ("recompute",)),
    ("model.moe.mesh", ({"expert": 1, "shard": "auto"}, {"expert": 2, "replicate": 2, "shard": "auto"})),
    ("callbacks.lr_monitor", ({}, None)),
    ("callbacks.memory_monitor", ({},)),
    ("callbacks.nan_monitor", ({},)),
    ("loggers", ({"tensorboard": {"log_dir": "x"}}, {"inmemory": {}}, None)),
    ("save_folder", ("out/{run_name}",)),
    ("run_name", ("x", None)),
    ("fsdp_config", ({"activation_checkpointing": True}, {"sharding_strategy": "FULL_SHARD"}, {})),
    ("variables.anything", (1, "x", {"a": [1]})),
)


def put(run: Run, path: str, value: Any) -> None:
    """Sets a value, making the mappings on its way."""
    *parents, last = path.split(".")
    for key in parents:
        if not isinstance(run.get(key), dict):
            run[key] = {}
        run = run[key]
    run[last] = copy.deepcopy(value)


def drop(run: Run, path: str) -> None:
    *parents, last = path.split(".")
    for key in parents:
        run = run[key]
    run.pop(last, None)


def keep_right(draw: random.Random, run: Run) -> None:
    """One edit after which the run is as right as before."""
    path, values = draw.choice(GOOD_VALUES)
    put(run, path, draw.choice(values))


def misspell(draw: random.Random, run: Run) -> None:
    """A key that nobody reads: a known one with a letter too many, or another word."""
    places = [path for path in CLOSED if isinstance(_at(run, path), dict)]
    place: Any = _at(run, draw.choice(places))
    known = [key for key in place if isinstance(key, str)] or ["name"]
    key = draw.choice(known)
    at = draw.randrange(len(key) + 1)
    wrong = draw.choice([key[:at] + draw.choice("qxz") + key[at:], f"{key}_{key}", "zzz", key.upper()])
    place[wrong] = place.pop(key) if draw.random() < 0.5 and key in place else 1


def put_bad_value(draw: random.Random, run: Run) -> None:
    path, values = draw.choice(BAD_VALUES)
    put(run, path, draw.choice(values))


def drop_needed(draw: random.Random, run: Run) -> None:
    drop(run, draw.choice([path for path in NEEDED if _at(run, tuple(path.split("."))) is not None]))


WRONG: tuple[Edit, ...] = (misspell, put_bad_value, drop_needed)


def _at(run: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        run = run.get(key) if isinstance(run, dict) else None
    return run


def _nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _nodes(inner, (*path, key))


def replace_blindly(draw: random.Random, run: Run) -> None:
    """Some node of the run becomes anything, goes, or gets a key of any kind beside it."""
    *parents, last = draw.choice(list(_nodes(run)))
    place: Any = run
    for key in parents:
        place = place[key]
    kind = draw.randrange(3)
    if kind == 0:
        place[last] = copy.deepcopy(draw.choice(JUNK))
    elif kind == 1:
        del place[last]
    elif isinstance(place, dict):
        place[draw.choice(["x", 3, None, True, 1.5, "${a}", "a.b", "name", ""])] = copy.deepcopy(draw.choice(JUNK))


def tear(draw: random.Random, raw: bytes) -> bytes:
    """The file's bytes, cut or with some of them replaced."""
    if draw.random() < 0.3:
        return raw[: draw.randrange(len(raw))]
    torn = bytearray(raw)
    for _ in range(draw.randrange(1, 6)):
        torn[draw.randrange(len(torn))] = draw.choice(
            [*b"0123456789abcxyz", *b" :-{}[]&*!|>'\"%@`,#\n\t", draw.randrange(256)]
        )
    return bytes(torn)


def ask(path: Path, *arguments: str) -> tuple[int | None, str]:
    """What `foundry-moe check` answers: its exit code, None for a traceback, and what it printed."""
    out, error = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            command(["check", str(path), *arguments])
    except SystemExit as stopped:
        return int(stopped.code or 0), out.getvalue() + error.getvalue()
    except BaseException:
        return None, traceback.format_exc()
    raise AssertionError("the command did not end")


def load_all() -> list[Run]:
    """The runs of `yamls/`, `${...}` resolved, so that edits at one place stay there."""
    return [OmegaConf.to_container(OmegaConf.load(path), resolve=True) for path in YAMLS]  # type: ignore[misc]


def run_cases(cases: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Asks about so many files; returns how many cases of which kind ended how, and what failed, with its file."""
    counts: Counter[str] = Counter()
    failures = []
    runs = load_all()
    path = folder / "run.yaml"
    for case in range(cases):
        draw = random.Random(f"{seed} {case}")
        kind = draw.choice(["right", "wrong", "wrong", "any", "torn"])
        # a run with code of its own may bring any name, so what is wrong elsewhere may be right there
        run = copy.deepcopy(draw.choice([run for run in runs if kind != "wrong" or "code_paths" not in run]))
        for _ in range(draw.randrange(3) if kind != "right" else draw.randrange(1, 6)):
            keep_right(draw, run)
        if kind == "wrong":
            draw.choice(WRONG)(draw, run)
        if kind == "any":
            for _ in range(draw.randrange(1, 4)):
                replace_blindly(draw, run)
        raw = yaml.safe_dump(run, sort_keys=False, allow_unicode=True).encode()
        path.write_bytes(tear(draw, raw) if kind == "torn" else raw)
        code, said = ask(path)
        answer = {0: "accepted", USER_ERROR: "refused", None: "traceback"}.get(code, f"exit code {code}")
        counts[f"{kind}: {answer}"] += 1
        one_line = code != USER_ERROR or all(line.startswith("error: ") for line in said.splitlines())
        right_answer = {"right": code == 0, "wrong": code == USER_ERROR}.get(kind, code in (0, USER_ERROR))
        if not (right_answer and one_line):
            failures.append(f"case {case} ({kind}, {answer}):\n{said}\n{path.read_bytes()!r}")
    return counts, failures


def main() -> int:
    """The long form; 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts, failures = run_cases(arguments.cases, arguments.seed, Path(folder))
    for kind, count in sorted(counts.items()):
        print(f"{count:7} {kind}")
    for failure in failures[:20]:
        print(failure)
    print(f"{arguments.cases} cases, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
