"""A real Slurm on the loopback: munged, slurmctld and two slurmd of one machine, in a folder of their own."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
MISSING = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
NODES = ("n1", "n2")
DEADLINE = 20.0  # seconds for anything that is awaited, unless told
# cred_expire: seconds that a requeued job waits before it starts again; 120 unless given, 5 at least.

CONF = """
ClusterName=sparring
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0,defer_batch
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
JobRequeue=1
KillWait=10
CompleteWait=0
MinJobAge=300
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmctldDebug=info
SlurmdDebug=info
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Cluster:
    """The folder of a running Slurm, its environment, and its daemons."""

    folder: Path
    environment: dict[str, str]
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str) -> None:
        """Start a daemon in the foreground."""
        name = f"{Path(command[0]).name}-{len(self.daemons)}"
        with (self.folder / f"{name}.out").open("wb") as file:
            self.daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
            )

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints; empty where it failed."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=DEADLINE)
        return done.stdout.strip() if done.returncode == 0 else ""

    def run(self, *command: str) -> None:
        """A command of Slurm that must succeed."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=DEADLINE)
        assert done.returncode == 0, f"{command}: {done.stderr}"

    def cancel(self) -> None:
        """End all jobs."""
        self.ask("scancel", f"--user={getpass.getuser()}")

    def logs(self) -> str:
        """The ends of the daemons' logs, for the message of a failed test."""
        paths = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)


def until(
    condition: Callable[[], object], what: str, deadline: float = DEADLINE, *, logs: Callable[[], str] = str
) -> None:
    """Wait for a condition, and fail where it does not come true in time."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {deadline:.0f} s\n{logs()}"
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def slurm() -> Iterator[Cluster]:
    """Start the daemons, wait until both nodes are idle, and end all of them afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's path has at most 107 letters
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    cluster = Cluster(folder, {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")})
    try:
        _configure(folder)
        cluster.start(*_munged(folder))
        until((folder / "munge.socket").exists, "munged", logs=cluster.logs)
        cluster.start("slurmctld", "-D", "-i")
        for node in NODES:
            cluster.start("slurmd", "-D", "-N", node)
        until(lambda: _idle(cluster), "two idle nodes", logs=cluster.logs)
        yield cluster
    finally:
        _end(cluster)
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path) -> None:
    host = socket.gethostname().partition(".")[0]
    text = CONF.format(folder=folder, ports=free_ports(3), host=host, user=getpass.getuser())
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)


def _munged(folder: Path) -> Sequence[str]:
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munge.seed"}
    words = [f"--{flag}={folder / name}" for flag, name in files.items()]
    return ("munged", "--foreground", "--force", *words, f"--log-file={folder / 'munged.log'}")


def _idle(cluster: Cluster) -> bool:
    return cluster.ask("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * len(NODES)


def _end(cluster: Cluster) -> None:
    """Cancel what still runs, then stop the daemons: asked first, killed after some seconds."""
    if len(cluster.daemons) > 1:
        cluster.cancel()
    for daemon in reversed(cluster.daemons):
        daemon.terminate()
    end = time.monotonic() + 5
    for daemon in cluster.daemons:
        try:
            daemon.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
