"""Before training: a run's configuration and its checks, spare ranks, launchers, and the report of a user's mistake.

Private functions of torch and Composer that this package replaces while it runs. Each was checked in the versions
given; "Public way" is the public alternative that was considered. Left to torchrun's own settings:
`--signals-to-handle` (where torch has it), `--max-restarts`, `--monitor-interval`, `--rdzv-conf`, and
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`.

torch 2.7.0 and 2.11.0, `launch/torchrun.py`. torchrun creates its agent itself, so `launcher.api.LocalElasticAgent` is
replaced by a subclass of it with these methods:

- `_monitor_workers`: no restart after exit codes 2, 3 and 4, and the end of processes that wait for a lost node. Public
  way: none; every exit code but 0 counts as a failure that `--max-restarts` repeats.
- `_start_workers`, `_stop_workers`: begin and end of the heartbeats of one start. Public way: none;
  `keep_alive_interval` of `--rdzv-conf` removes a silent node from the rendezvous and leaves its peers in a collective.
  `_start_workers` also replaces `close` of the processes: it waits for `elastic_checkpoint.grace`, not 30 s, and kills
  the peers of a failed process at once, or 2 s after a user's mistake, which rank 0 prints. Public way: none; 30 s is a
  default argument that no flag sets.
- `_shutdown`: a second signal does not end the wait for the save. Public way: none.

and `SubprocessHandler._popen` takes processes from `launch/fork_server.py`. Public way: `--run-path --start-method
forkserver` starts Python functions without a session of their own, without exit handlers, and reports one failure.
`launch/rendezvous.py` uses torch's public registry of rendezvous backends. `launch/rendezvous_state.py` builds torch's
`_RendezvousState` and `_NodeDesc` from JSON. Public way: none; a backend stores what the handler pickles.

torch 2.7.0, CPU processes only:

- `_fsdp_collectives._get_gradient_divide_factors` (`parallel/mesh.py`): gloo of that version sums where FSDP2 asks for
  an average. Public way: none found; torch 2.11 needs none.

torch 2.11.0:

- `FSDPParamGroup.mesh_info` (`parallel/gradient_messages.py`), of two replicas of whole weights: the mesh of a shard
  group alone, so that FSDP2 calls its all-reduce hook in place of its all-reduce. Public way: none; the hook of a mesh
  with replicas runs after the all-reduce.
- `FSDPParam.mesh_info` (`parallel/one_pass_cast.py`): the same mesh, sliced once. Public way: none; later versions keep
  it.

Composer 0.32.1:

- `trainer.checkpoint.load_checkpoint` and `trainer.maybe_create_object_store_from_uri`
  (`callbacks/elastic_checkpoint.py`): skip `load_path` in a run that resumes, and read one that is a folder of
  `elastic_checkpoint`. Public way: none; callbacks do not see the path. Composer documents a replacement of the first.
- `prepare_distributed.meta_init` (`algorithms/weights_from_files.py`): gives parameters memory without drawing values.
  Public way: none found; Composer calls it for every model on the meta device.

LLM Foundry 0.22, `train.py`: `command_utils.train.log_config` is replaced by `console.record_config`, which prints
nothing. Public way: `log_config: false` also keeps the configuration from the loggers.
"""
