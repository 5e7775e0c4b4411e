"""What each optimizer keeps and what its step needs, in bytes per trained parameter."""

from dataclasses import dataclass

from lightning_shard.specs.sizes import require_choice

IMPLEMENTATIONS = ("foreach", "fused", "loop")


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """One optimizer class, for FP32 parameters: states follow the parameter's dtype in torch."""

    name: str
    num_moments: int
    """State tensors of the parameter's shape."""
    factored: bool = False
    """Keeps one row and one column statistic of each matrix instead of a full moment (Adafactor)."""
    foreach_temporaries: int = 0
    """Tensors of all parameters' size that the foreach step makes at once."""


OPTIMIZERS: dict[str, Optimizer] = {
    row.name: row
    for row in (
        # torch.optim.adamw._multi_tensor_adamw: exp_avg_sq_sqrt is the one list of new tensors alive at a time.
        Optimizer(name="adamw", num_moments=2, foreach_temporaries=1),
        Optimizer(name="adam", num_moments=2, foreach_temporaries=1),
        Optimizer(name="adamax", num_moments=2, foreach_temporaries=1),
        Optimizer(name="nadam", num_moments=2, foreach_temporaries=1),
        Optimizer(name="radam", num_moments=2, foreach_temporaries=2),
        Optimizer(name="sgd", num_moments=0),
        Optimizer(name="sgd-momentum", num_moments=1),
        Optimizer(name="adagrad", num_moments=1, foreach_temporaries=1),
        Optimizer(name="rmsprop", num_moments=1, foreach_temporaries=1),
        Optimizer(name="lion", num_moments=1, foreach_temporaries=1),
        Optimizer(name="adafactor", num_moments=0, factored=True, foreach_temporaries=1),
    )
}


def find_optimizer(name: str) -> Optimizer:
    """The row for an optimizer's name, case and separators ignored.

    Raises:
        ValueError: for an optimizer whose state is not known.
    """
    row = OPTIMIZERS.get(name.strip().lower().replace("_", "-"))
    if row is None:
        raise ValueError(
            f"optimizer={name!r} is not known, so the bytes of its state are not. Known: {', '.join(OPTIMIZERS)}. "
            "Name the one whose state has the same size."
        )
    return row


def require_implementation(value: str) -> None:
    """Raise unless the value names one of torch's ways to run an optimizer step."""
    require_choice("optimizer_implementation", value, IMPLEMENTATIONS)
