"""What each value of Lightning's ``precision=`` means here, and how many bytes a dtype takes."""

from dataclasses import dataclass

DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """What one value of Lightning's ``precision=`` means here, the same under every layout.

    What trains always has an FP32 master copy (an update smaller than a bf16 rounding step would
    vanish otherwise); the optimizer's state and the gradient reduction follow it.
    """

    name: str
    """Lightning's flag."""
    master_dtype: str
    """Storage of what trains, of its gradients and its optimizer state."""
    frozen_dtype: str | None
    """Storage of what does not train; None leaves it as the user loaded it."""
    compute_dtype: str | None
    """Type of the matrix products; None computes in the stored type."""
    reduce_dtype: str
    """Type in which gradients travel."""
    norms_in_fp32: bool = False
    """Whether norms keep their weights in FP32 and compute in it, whatever the rest does."""


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision(
            name="32-true", master_dtype="float32", frozen_dtype=None, compute_dtype=None, reduce_dtype="float32"
        ),
        Precision(
            name="64-true", master_dtype="float64", frozen_dtype="float64", compute_dtype=None, reduce_dtype="float64"
        ),
        Precision(
            name="bf16-true",
            master_dtype="float32",
            frozen_dtype="bfloat16",
            compute_dtype="bfloat16",
            reduce_dtype="float32",
        ),
        Precision(
            name="bf16-mixed",
            master_dtype="float32",
            frozen_dtype=None,
            compute_dtype="bfloat16",
            reduce_dtype="float32",
        ),
        Precision(
            name="16-mixed", master_dtype="float32", frozen_dtype=None, compute_dtype="float16", reduce_dtype="float32"
        ),
    )
}


def find_precision(name: str) -> Precision:
    """The row of :data:`PRECISIONS` for one of Lightning's flags.

    Raises:
        ValueError: for a precision that has no meaning here.
    """
    aliases = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed", "16": "16-mixed"}
    row = PRECISIONS.get(aliases.get(str(name), str(name)))
    if row is None:
        raise ValueError(
            f"precision={name!r} is not supported. Use one of {', '.join(PRECISIONS)}: "
            "each keeps FP32 masters of what trains."
        )
    return row


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        ValueError: for a dtype that is not in :data:`DTYPE_BYTES`.
    """
    size = DTYPE_BYTES.get(dtype)
    if size is None:
        raise ValueError(f"dtype={dtype!r} is not known. Use one of {', '.join(DTYPE_BYTES)}.")
    return size
