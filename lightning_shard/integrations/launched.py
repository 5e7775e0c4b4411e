"""How many nodes and devices the launcher started, in Trainer's words."""

import os
from collections.abc import Mapping

INTERACTIVE = ("bash", "interactive")
"""Names of SLURM jobs in which processes are started by hand."""


def launched(environment: Mapping[str, str] | None = None) -> dict[str, int]:
    """``{"num_nodes": ..., "devices": ...}`` of this job, for ``Trainer(**launched(), ...)``.

    The world is nodes times devices, whatever it is today: an elastic restart or a requeued job may have
    another size than the script was written for. Read from torchrun's variables (which Kubernetes' PyTorchJob
    and JobSet set through it), else from SLURM's; empty where neither started this process, so that Trainer's
    own defaults hold.

    Args:
        environment: variables to read; this process's by default.

    Raises:
        ValueError: when nodes have different numbers of ranks, which no Trainer can describe.
    """
    variables = os.environ if environment is None else environment
    if "WORLD_SIZE" in variables and "LOCAL_WORLD_SIZE" in variables:
        return _split(variables, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "torchrun --nproc-per-node")
    if "SLURM_NTASKS" in variables and variables.get("SLURM_JOB_NAME") not in INTERACTIVE:
        if "SLURM_NTASKS_PER_NODE" not in variables:
            raise ValueError(
                f"SLURM started {variables['SLURM_NTASKS']} tasks without saying how many a node has. Submit with "
                "--ntasks-per-node (one task per device)."
            )
        return _split(variables, "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "sbatch --ntasks-per-node")
    return {}


def _split(variables: Mapping[str, str], total: str, per_node: str, option: str) -> dict[str, int]:
    world, local = int(variables[total]), int(variables[per_node])
    if local < 1 or world % local:
        raise ValueError(
            f"{total}={world} is not a multiple of {per_node}={local}: nodes have different numbers of ranks. Start as "
            f"many on each ({option})."
        )
    return {"num_nodes": world // local, "devices": local}
