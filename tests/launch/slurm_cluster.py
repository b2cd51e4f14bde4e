"""A real Slurm on one machine: munge, one controller, two nodes. Started and ended by tests.

Run by hand it leaves a cluster up until Ctrl-C, to try launch.sh on a laptop:

    sudo python tests/launch/slurm_cluster.py        # prints the SLURM_CONF to export
"""

import contextlib
import getpass
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
CONF = """
ClusterName=laptop
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
FirstJobId={first}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=15
CryptoType=crypto/munge
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
SchedulerParameters=sched_interval=1,batch_sched_delay=0,requeue_delay=1
MinJobAge=600
KillWait=5
# One machine may stand still for longer than Slurm waits for a node; it would start a job again.
SlurmdTimeout=300
MessageTimeout=60
BatchStartTimeout=60
InactiveLimit=0
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
JobRequeue=1
SlurmdParameters=config_overrides
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} RealMemory=4000
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory=4000
PartitionName=batch Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


def _which(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


class Cluster:
    """A running Slurm; `env` is the environment that its commands need."""

    def __init__(self, root: pathlib.Path):
        self.root, self.daemons = root, {}
        self.env = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        for name in [n for n in self.env if n.startswith(("SLURM_", "SBATCH_"))]:
            if name != "SLURM_CONF":
                del self.env[name]

    def start(self) -> None:
        """Starts the daemons and waits until both nodes are idle.

        Raises:
          RuntimeError: they were not within a minute; the message holds the logs' ends.
        """
        root = self.root
        (root / "state").mkdir(parents=True)
        key = root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        ports = _free_ports(3)
        host = socket.gethostname().partition(".")[0]
        about = dict(host=host, ports=ports, root=root, user=getpass.getuser(), cpus=2)
        # jax makes a coordinator's port of the job's number: two clusters here must not share any.
        self._conf(CONF.format(**about, first=random.randrange(1000, 60000)))
        munge = ["munged", "-F", "--force", f"--key-file={key}", f"--socket={root}/munge.socket"]
        munge += [f"--{n}={root}/munge.{n.partition('-')[0]}" for n in ("pid-file", "log-file")]
        self._daemon("munged", [*munge, f"--seed-file={root}/munge.seed"])
        _wait(lambda: (root / "munge.socket").exists(), 20, "munged created no socket")
        self._daemon("slurmctld", ["slurmctld", "-D", "-i"])
        self.start_node("node1")
        self.start_node("node2")
        try:
            _wait(lambda: self.states() == {"node1": "idle", "node2": "idle"}, 60, "no idle nodes")
        except RuntimeError as e:
            logs = "\n".join(f"{p}:\n{p.read_text()[-1500:]}" for p in root.glob("*.log"))
            raise RuntimeError(f"{e}: {self.states()}\n{logs}") from None

    def _conf(self, text: str) -> None:
        (self.root / "slurm.conf").write_text(text)

    def start_node(self, name: str) -> None:
        (self.root / f"spool-{name}").mkdir(exist_ok=True)
        self._daemon(name, ["slurmd", "-D", "-N", name])

    def kill_node(self, name: str) -> None:
        """Kills slurmd and all its processes, as a power failure, and marks the node as down."""
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait()
        self._kill_tasks(name)
        self.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=not responding")

    def _kill_tasks(self, node: str = "") -> None:
        """Kills tasks on a node, or on all, and the daemons above them (no children of slurmd)."""
        tasks = _with_environment(f"SLURM_CONF={self.env['SLURM_CONF']}", f"SLURMD_NODENAME={node}")
        steps = {p for t in tasks if (p := _parent(t)) and _command(p).startswith("slurmstepd")}
        for pid in [*steps, *tasks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _daemon(self, name: str, command: list[str]) -> None:
        with open(self.root / f"{name}.stdout", "ab") as out:
            self.daemons[name] = subprocess.Popen(
                [_which(command[0]), *command[1:]], env=self.env, stdout=out, stderr=out
            )

    def run(self, *command: str, **kwargs) -> str:
        """Output of a Slurm command."""
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=60, **kwargs
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        try:
            lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        except RuntimeError:
            return {}
        return dict(line.split() for line in lines)

    def job(self, number: str) -> dict[str, str]:
        """Fields of scontrol show job."""
        text = self.run("scontrol", "show", "job", number, "--oneliner")
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait(self, number: str, seconds: float = 120) -> dict[str, str]:
        """Waits for the end of a job; returns its fields.

        Raises:
          RuntimeError: it did not end in time.
        """
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL")
        _wait(lambda: self.job(number)["JobState"] in over, seconds, f"job {number} did not end")
        return self.job(number)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            self.run("scancel", "-u", getpass.getuser(), "--signal=KILL", "--full")
        self._kill_tasks()
        for daemon in reversed(self.daemons.values()):
            daemon.kill()
            daemon.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def _wait(done, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise RuntimeError(f"{what} within {seconds:.0f} s")
        time.sleep(0.2)


def _with_environment(*starts: str) -> list[int]:
    """Processes whose environment has a variable with each of these beginnings."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            # an empty value matches every value
            match = lambda s, words=words: any(
                w == s or (s.endswith("=") and w.startswith(s)) for w in words
            )
            if all(match(s) for s in starts):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """A Slurm cluster for as long as the block lasts."""
    root = pathlib.Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    root.chmod(0o755)
    started = Cluster(root)
    try:
        started.start()
        yield started
    finally:
        started.stop()
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job ignores SIGINT
        signal.signal(number, signal.default_int_handler)
    with cluster() as up:
        print(f"two idle nodes; in another shell:\n  export SLURM_CONF={up.env['SLURM_CONF']}")
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
