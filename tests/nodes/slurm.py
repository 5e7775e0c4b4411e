"""A SLURM of this machine alone, for as long as a test needs it.

Its programs come from the PATH, or from the folder that LIGHTNING_SHARD_SLURM names: Debian's packages slurmctld,
slurmd, slurm-client and slurm-wlm-basic-plugins, unpacked there with ``dpkg -x`` and not installed.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.ports import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "sinfo", "srun")
LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
START_S = 30.0


def program(name: str) -> str | None:
    """Path of one of SLURM's programs; Debian adds -wlm to the daemons' names."""
    root = os.environ.get("LIGHTNING_SHARD_SLURM")
    folders = [Path(root, "usr/bin"), Path(root, "usr/sbin")] if root else []
    search = os.pathsep.join([*map(str, folders), os.environ.get("PATH", ""), "/usr/sbin"])
    return shutil.which(name, path=search) or shutil.which(f"{name}-wlm", path=search)


def why_not() -> str | None:
    """Why there can be no SLURM here; None where there can."""
    missing = [name for name in PROGRAMS if program(name) is None]
    if missing:
        return f"SLURM is not here ({', '.join(missing)}): install it, or name its unpacked packages in LIGHTNING_SHARD_SLURM"
    return "SLURM's daemons need root here" if os.geteuid() else None


@contextmanager
def one_node(folder: Path) -> Iterator[dict[str, str]]:
    """Environment for SLURM's commands while its two daemons run; they end with the block."""
    environment = _environment(folder)
    (folder / "state").mkdir(parents=True)
    (folder / "spool").mkdir()
    Path(environment["SLURM_CONF"]).write_text(_configuration(folder))
    daemons = []
    try:
        for name, options in (("slurmctld", ["-D", "-i"]), ("slurmd", ["-D", *_stepd()])):
            output = (folder / f"{name}.out").open("w")
            command = [str(program(name)), *options]
            daemons.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
            time.sleep(2)
        _wait_idle(folder, environment)
        yield environment
    finally:
        subprocess.run([str(program("scancel")), "--user", "root"], env=environment, check=False, timeout=20)
        time.sleep(2)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=30)


def _environment(folder: Path) -> dict[str, str]:
    root = os.environ.get("LIGHTNING_SHARD_SLURM")
    programs = os.pathsep.join({str(Path(str(program(name))).parent) for name in PROGRAMS})
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment = {**kept, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{programs}:{os.environ['PATH']}"}
    if root:
        environment["LD_LIBRARY_PATH"] = f"{Path(root, LIBRARIES)}:{Path(root, LIBRARIES, 'slurm-wlm')}"
    return environment


def _stepd() -> list[str]:
    stepd = program("slurmstepd")
    return ["-d", stepd] if stepd else []


def _configuration(folder: Path) -> str:
    host, root = socket.gethostname().split(".")[0], os.environ.get("LIGHTNING_SHARD_SLURM")
    lines = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": "root",
        "AuthType": "auth/none",
        "CredType": "cred/none",
        "MpiDefault": "none",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SlurmctldPort": free_port(),
        "SlurmdPort": free_port(),
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        "SlurmdSpoolDir": folder / "spool",
        "StateSaveLocation": folder / "state",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": folder / "slurmd.log",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SchedulerParameters": "requeue_delay=0",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        **({"PluginDir": Path(root, LIBRARIES, "slurm-wlm")} if root else {}),
    }
    text = "".join(f"{name}={value}\n" for name, value in lines.items())
    node = f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN\n"
    return f"{text}{node}PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP\n"


def _wait_idle(folder: Path, environment: dict[str, str]) -> None:
    command = [str(program("sinfo")), "--noheader", "--format=%T"]
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        state = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if state.stdout.strip() == "idle":
            return
        time.sleep(0.5)
    logs = "\n".join(file.read_text()[-2000:] for file in sorted(folder.glob("*.out")))
    raise RuntimeError(f"SLURM did not start within {START_S:.0f} s:\n{logs}")
