"""A private SLURM of two nodes on this machine, from Debian's packages; nothing of the system is changed.

Usable by hand, too: ``python -m tests.slurm.cluster FOLDER`` starts one and stops it at Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
PATH = f"/usr/sbin:/sbin:{os.environ['PATH']}"
# Names of loopback addresses: they resolve without an entry in /etc/hosts, and the ranks meet at the first one.
PREFIX = "127.0.1."


class UnavailableError(Exception):
    """SLURM cannot be installed or started here; the message says why."""


def install() -> None:
    """Install the packages with apt if the programs are not there. Raises UnavailableError."""
    if missing() and not shutil.which("apt-get"):
        raise UnavailableError(f"{', '.join(missing())} not found, and no apt-get to install them with")
    if missing() and os.geteuid() != 0:
        raise UnavailableError(f"{', '.join(missing())} not found; as root: apt-get install {' '.join(PACKAGES)}")
    if missing():
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
            done = subprocess.run(["apt-get", *command], env=quiet, capture_output=True, text=True, timeout=300)
            if done.returncode:
                raise UnavailableError(f"apt-get {' '.join(command)}: {done.stderr.strip()[-500:]}")
    if missing():
        raise UnavailableError(f"{', '.join(missing())} not found after the installation")


def missing() -> list[str]:
    """Programs that are needed and not there."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


class Cluster:
    """A running cluster; ``environment`` is what its clients need.

    Args:
        folder: for everything it writes; its path must be short, for the sake of a socket in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._processes: list[subprocess.Popen] = []
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        (folder / "state").mkdir(exist_ok=True)
        self._write_config()
        try:
            self._start_munge()
            self._start("slurmctld", "-D")
            for node in (f"{PREFIX}0", f"{PREFIX}1"):
                (folder / f"spool-{node}").mkdir(exist_ok=True)
                self._start("slurmd", "-D", "-N", node)
            self._wait_until_idle()
        except BaseException:
            self.stop()
            raise

    def _write_config(self) -> None:
        template = (Path(__file__).parent / "slurm.conf.in").read_text()
        base = _free_ports()
        values = {
            "host": socket.gethostname().split(".")[0],
            "user": getpass.getuser(),
            "folder": str(self.folder),
            "port": str(base),
            "node_ports": f"{base + 1}-{base + 2}",
            "srun_ports": f"{base + 10}-{base + 90}",
            "prefix": PREFIX,
        }
        for name, value in values.items():
            template = template.replace("{" + name + "}", value)
        (self.folder / "slurm.conf").write_text(template)
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        # A GPU's file must be a character device; nothing opens it.
        device = "/dev/tty[0-1]" if Path("/dev/tty1").is_char_device() else "/dev/null"
        count = "" if device.endswith("]") else " Count=2"
        (self.folder / "gres.conf").write_text(f"NodeName={PREFIX}[0-1] Name=gpu File={device}{count}\n")

    def _start_munge(self) -> None:
        # A key and a socket of its own.
        secret = self.folder / "munge"
        secret.mkdir(mode=0o700, exist_ok=True)
        (secret / "key").write_bytes(os.urandom(128))
        (secret / "key").chmod(0o600)
        self._start(
            "munged", "--foreground", "--force", f"--key-file={secret}/key", f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munged.pid", f"--log-file={secret}/log", f"--seed-file={secret}/seed",
        )  # fmt: skip
        _wait_for(lambda: (self.folder / "munge.socket").exists(), 10, "munged")

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as file:
            self._processes.append(
                subprocess.Popen(
                    command, env=self.environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )  # fmt: skip

    def _wait_until_idle(self) -> None:
        def idle() -> bool:
            for process in self._processes:
                if process.poll() is not None:
                    logs = "".join(path.read_text()[-500:] for path in self.folder.glob("*.out"))
                    raise UnavailableError(f"{process.args[0]} ended: {logs}")
            return self.call("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N", check=False).count("\n") == 2

        _wait_for(idle, 60, f"the nodes (logs in {self.folder})")

    def call(self, *command: str, check: bool = True) -> str:
        """Run a client and return what it printed. Raises subprocess.CalledProcessError."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.returncode}: {done.stderr}")
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Fields of ``scontrol show job``."""
        words = self.call("scontrol", "-o", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def cancel_all(self) -> None:
        """End every job and wait until they are gone."""
        self.call("scancel", "-u", str(os.getuid()), check=False)
        _wait_for(lambda: not self.call("squeue", "-h", check=False).strip(), 60, "the end of the jobs")

    def stop(self) -> None:
        """End the jobs first (their supervisors would outlive the daemons), then the daemons."""
        if len(self._processes) > 2:
            try:
                self.cancel_all()
            except (TimeoutError, subprocess.TimeoutExpired) as error:
                print(f"jobs were left behind: {error}", file=sys.stderr)
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(condition: object, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not there after {seconds} s")
        time.sleep(0.1)


def _free_ports() -> int:
    """The first of a hundred ports, of which the ones of the daemons are free.

    Each process starts looking at a place of its own: another's daemons may not listen yet.
    """
    for number in range(90):
        base = 21000 + (os.getpid() + number) % 90 * 100
        probes = [socket.socket() for _ in range(3)]
        try:
            for offset, probe in enumerate(probes):
                probe.bind(("127.0.0.1", base + offset))
            return base
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise UnavailableError("no free ports between 21000 and 30000")


if __name__ == "__main__":
    install()
    # A shell's background processes ignore SIGINT.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cluster = Cluster(Path(sys.argv[1]).absolute())
    print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}", flush=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        cluster.stop()
