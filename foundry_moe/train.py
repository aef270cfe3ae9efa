"""The training command: `foundry-moe train run.yaml -n 8 key=value ...`.

Each process runs this file; `composer`, `torchrun` and `docker/entrypoint.sh` start it too. It calls LLM Foundry's
trainer. Before that it checks the run without slow imports, and sets FSDP_VERSION=2, so that `fsdp_config` means FSDP2.
A run that is complete already ends without an error. Ranks that do not fit the mesh wait (`mesh.spares`).
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import os
import re
import signal
import sys
import traceback
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from foundry_moe.config import AUTO, RESHARD, MoEConfig
from foundry_moe.launch import fork_server
from foundry_moe.launch.checkpoint_settings import checkpoint_config
from foundry_moe.launch.console import quiet_third_parties, record_config, set_console
from foundry_moe.launch.ending import RunComplete, exit_on, is_first_rank, leave_after_handlers, stop_settings
from foundry_moe.launch.run_config import (
    check_device,
    check_whole_run,
    load_run,
    plain,
    ranks_that_train,
)
from foundry_moe.launch.run_files import file_mistakes, missing_files
from foundry_moe.launch.run_values import moe_path
from foundry_moe.launch.spares import dismiss, launched_ranks, take_place, wait_as_spare
from foundry_moe.launch.user_errors import PASSING_ERROR, raise_on_all_ranks, run_cleanly
from foundry_moe.schema import UserError, raise_mistakes, section

USAGE = "usage: foundry-moe train RUN.yaml -n PROCESSES [key=value ...]"
_MICROBATCH = "device_train_microbatch_size"
# of torch's allocator it is an error of its own
_OUT_OF_MEMORY = re.compile("CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure.*out of memory")
_FIRST_BATCHES = 3  # the peak of memory comes by then: the optimizer's state exists from the first step on
_COMPLETE = "No training would occur"  # in Composer's error for a run that has reached max_duration


def train(arguments: list[str]) -> int:
    """Trains; see the module's text. Returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    try:
        run, settings, config, ranks = checked(arguments)
    except UserError as error:
        raise_on_all_ranks(error)
    launched = launched_ranks()

    from foundry_moe.launch.network import stay_on_one_machine  # torch, which takes seconds

    stay_on_one_machine()
    if not take_place(ranks):
        wait_as_spare()
        return 0
    signals = _stop_signals(settings)
    exit_on(signals)
    os.environ.setdefault("FSDP_VERSION", "2")
    os.environ.setdefault("NODE_RANK", os.environ.get("GROUP_RANK", "0"))  # torchrun's name of it; Composer needs it
    prepare_wandb(run, settings)
    set_console(run)
    quiet_third_parties()

    from llmfoundry.command_utils import train as train_with_foundry

    exit_on(signals)  # Composer has replaced the handlers, and put filters of warnings before those above
    quiet_third_parties()
    connect(float(run.get("dist_timeout", 600.0)), launched > int(os.environ.get("LOCAL_WORLD_SIZE", launched)))
    if config is not None and config.mesh == AUTO:
        OmegaConf.update(run, f"{moe_path(settings)}.mesh", _choose_mesh(settings, ranks), merge=False)
        settings = plain(run)
    if (fsdp := section(settings, "fsdp_config")).get(RESHARD) == AUTO:
        run["fsdp_config"] = settings["fsdp_config"] = {**fsdp, RESHARD: ranks > 1 and _choose_reshard(settings, ranks)}
    if settings.get(_MICROBATCH, AUTO) == AUTO:
        run[_MICROBATCH] = settings[_MICROBATCH] = _choose_microbatch(settings, ranks, has_experts=config is not None)
    if is_first_rank():
        print(f"run {arguments[0]}, overrides: {len(arguments) - 1}, processes: {ranks}", flush=True)
    if "log_config" not in run:
        sys.modules[train_with_foundry.__module__].log_config = record_config  # type: ignore[attr-defined]
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # loggers close after a Ctrl-C without checkpoints
    # exit handlers run in reverse order: Composer registers its own later, and so closes callbacks and loggers first
    atexit.register(_destroy_process_group)
    try:
        # closed before the interpreter ends its thread pools, by which MLflow writes the metrics of the last 10 s
        train_with_foundry(run).close()
    except BaseException as error:
        by_load_path = isinstance(error, ValueError) and _COMPLETE in str(error)
        if not by_load_path and not isinstance(error, RunComplete):
            atexit.unregister(_destroy_process_group)  # other ranks may wait in a collective
            if (sentence := explain_out_of_memory(error, settings, ranks)) is not None:
                raise UserError(sentence) from error
            raise
        if by_load_path and is_first_rank():
            print(f"this run is complete: max_duration ({settings['max_duration']}) is reached, nothing to train")
    dismiss(launched - ranks)
    return 0


def train_command(arguments: argparse.Namespace) -> int:
    """`foundry-moe train`: checks a run, then starts its processes on this machine."""
    processes, words = arguments.nproc, [arguments.yaml, *arguments.overrides]
    exit_on(stop_settings(words).signals)
    number = "one per GPU" if processes is None else processes
    print(f"starting {arguments.yaml}, processes: {number}; their imports take 10 to 60 s", flush=True)
    if processes is None:
        import torch

        processes = max(1, torch.cuda.device_count())
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(processes)
    checked(words)

    from foundry_moe.launch.torchrun import launch_here

    return launch_here(processes, [__file__, *words])


def checked(arguments: list[str]) -> tuple[DictConfig, dict[str, Any], MoEConfig | None, int]:
    """The run, the same as plain dictionaries, its experts, and how many ranks train.

    Raises:
        ValueError: a sentence for each mistake.
    """
    if missing := [name for name in ("composer", "llmfoundry") if find_spec(name) is None]:
        raise UserError(
            f"the training command needs {' and '.join(missing)}, which the base install leaves out: "
            "pip install '.[foundry]' in the folder of foundry_moe's sources"
        )
    run = load_run(arguments[0], arguments[1:], USAGE)
    settings = plain(run)
    config = check_whole_run(settings)
    raise_mistakes([*missing_files(settings), *file_mistakes(settings)])
    check_device(settings)
    return run, settings, config, ranks_that_train(settings, config)


def _stop_signals(run: Mapping[str, Any]) -> tuple[str, ...]:
    """The signals on which `elastic_checkpoint` saves; none without it."""
    callbacks = section(run, "callbacks")
    keys = section(run, "callbacks", "elastic_checkpoint")
    return checkpoint_config(keys).signals if "elastic_checkpoint" in callbacks else ()


def connect(timeout_s: float, several_nodes: bool) -> None:
    """Collective: makes the process group of a run on GPUs or several nodes, before LLM Foundry makes it.

    Without the all-reduce a barrier is NCCL's first operation, and NCCL warns that it guesses the barrier's device.
    """
    import torch
    from composer.utils import dist, get_device

    if not several_nodes and not torch.cuda.is_available():
        return
    dist.initialize_dist(get_device(None), timeout=timeout_s)
    if torch.cuda.is_available():
        torch.distributed.all_reduce(torch.zeros(1, device="cuda"))
    if several_nodes:
        from foundry_moe.launch.network import log_network_speed

        log_network_speed()


def _choose_microbatch(run: Mapping[str, Any], ranks: int, *, has_experts: bool) -> int | str:
    """Collective: the planner's largest microbatch for the GPU with the least free memory.

    Composer's own `auto` tries sizes until one fits, and does not support FSDP2. It stays for one process without
    experts, which the planner does not plan.

    Raises:
        ValueError: on all ranks; see `choose_microbatch`.
    """
    from foundry_moe.commands.plan.microbatch import choose_microbatch
    from foundry_moe.commands.plan.step import GIB

    if ranks == 1 and not has_experts:
        return AUTO
    try:
        plan = choose_microbatch(run, _machine(ranks, _least_memory()))
    except UserError as error:
        raise_on_all_ranks(error)
    if is_first_rank():
        sizes = f"{plan.memory_bytes / GIB:.1f} of {plan.machine.gpu_bytes / GIB:.1f} GiB on each GPU"
        print(f"{_MICROBATCH}: {plan.microbatch} (auto: {sizes} by the plan)", flush=True)
    return plan.microbatch


def _choose_mesh(run: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """Collective on GPUs: the planner's mesh for `mesh: auto`. On CPU processes it plans the memory of an H100.

    Raises:
        ValueError: on all ranks; see `choose_mesh`.
    """
    import torch

    from foundry_moe.commands.plan.constants import CHIPS
    from foundry_moe.commands.plan.microbatch import choose_mesh
    from foundry_moe.commands.plan.step import GIB

    on_gpu = torch.cuda.is_available()
    memory = _least_memory() if on_gpu else CHIPS["h100"].memory_gib * GIB
    try:
        widths, said = choose_mesh(run, _machine(ranks, memory), "cuda" if on_gpu else "cpu")
    except UserError as error:
        raise_on_all_ranks(error)
    if is_first_rank():
        print(said, flush=True)
    return widths


def _choose_reshard(run: Mapping[str, Any], ranks: int) -> bool:
    """Collective on GPUs: whether weights are gathered again for the backward pass."""
    import torch

    from foundry_moe.commands.plan.microbatch import choose_reshard

    machine = _machine(ranks, _least_memory()) if torch.cuda.is_available() else None
    resharded, said = choose_reshard(run, machine)
    if is_first_rank():
        print(said, flush=True)
    return resharded


def _least_memory() -> int:
    """Collective: free memory of the fullest GPU, with that of this process's context."""
    import torch

    from foundry_moe.commands.plan.step import CONTEXT_BYTES

    free_bytes = torch.tensor(torch.cuda.mem_get_info()[0], device="cuda")
    torch.distributed.all_reduce(free_bytes, op=torch.distributed.ReduceOp.MIN)
    return int(free_bytes) + CONTEXT_BYTES


def _machine(ranks: int, gpu_bytes: float) -> Any:
    from foundry_moe.commands.plan.planner import Machine

    per_node = min(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), ranks)
    return Machine(gpus=ranks, gpus_per_node=per_node, gpu_bytes=gpu_bytes)


def explain_out_of_memory(error: BaseException, run: Mapping[str, Any], ranks: int) -> str | None:
    """The sentence for a GPU that ran out of memory in the first batches of this process, where a restart would too."""
    import torch
    from composer import Trainer

    from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
    from foundry_moe.commands.plan.microbatch import out_of_memory

    elsewhere = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error))
    if not isinstance(error, torch.OutOfMemoryError) and not elsewhere:
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    trainer = next((own for frame in frames if isinstance(own := frame.f_locals.get("self"), Trainer)), None)
    where = "before the first batch"
    if trainer is not None:
        batch = trainer.state.timestamp.batch.value
        saves = (callback for callback in trainer.state.callbacks if isinstance(callback, ElasticCheckpoint))
        if batch - max((callback.resumed_from or 0 for callback in saves), default=0) >= _FIRST_BATCHES:
            return None
        where = f"in batch {batch + 1}"
    if any(frame.f_code.co_name == "_eval_loop" for frame in frames):
        return f"out of memory in an evaluation: lower device_eval_batch_size ({run.get('device_eval_batch_size')})"
    return out_of_memory(run, _machine(ranks, _memory_bytes()), where)


def _memory_bytes() -> int:
    """Memory of this process's GPU that is free or this process's own."""
    import torch

    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


def _destroy_process_group() -> None:
    """Destroys the process group at exit; NCCL warns if it is not destroyed."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


def prepare_wandb(run: DictConfig, settings: Mapping[str, Any]) -> None:
    """Creates wandb's folder, and gives wandb the `id` that the newest checkpoint records: a resumed run is one run.

    wandb ignores a folder in `init_kwargs.dir` that does not exist and uses /tmp.
    """
    given = section(settings, "loggers", "wandb", "init_kwargs")
    if folder := given.get("dir"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    keys = section(settings, "callbacks", "elastic_checkpoint")
    if not keys or "wandb" not in section(settings, "loggers") or given.get("id") or not is_first_rank():
        return
    from foundry_moe.callbacks.run_checkpoints import wandb_id

    if recorded := wandb_id(checkpoint_config(keys)):
        named = {"resume": "allow", **given, "id": recorded}
        OmegaConf.update(run, "loggers.wandb.init_kwargs", named, merge=False, force_add=True)


def main() -> None:
    """Entry point of the script."""
    fork_server.serve()
    faulthandler.enable(2)  # the stack of a process that a signal such as SIGSEGV ends
    completed = False

    def run() -> int:
        nonlocal completed
        code = train(sys.argv[1:])
        completed = True
        return code

    try:
        code = run_cleanly(run)
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = PASSING_ERROR
    if not completed:
        leave_after_handlers(code)
    sys.exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback before `exit_on`: the launcher prints one line
    main()
