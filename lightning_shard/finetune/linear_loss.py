"""Cross-entropy of a head's outputs without the logits of all tokens in memory at once."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_shard.activations.loss import CHUNK_TOKENS
from lightning_shard.parallelize.vocabulary import SplitHead, split_head


@dataclass(frozen=True, slots=True)
class LogitRule:
    """What a model does to its head's output: ``cap * tanh(scale * x / cap)``."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "LogitRule":
        """The rule of a transformers config: Gemma's soft cap, Cohere's and Granite's scales."""
        scale = getattr(config, "logit_scale", None) or 1.0
        return cls(
            scale / (getattr(config, "logits_scaling", None) or 1.0), getattr(config, "final_logit_softcapping", None)
        )

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    @property
    def is_identity(self) -> bool:
        """Whether logits are the head's output."""
        return self.scale == 1.0 and self.cap is None


def head_loss(head: nn.Module, hidden: Tensor, targets: Tensor, rule: LogitRule, *, liger: bool = False) -> Tensor:
    """Sum over tokens of the cross-entropy of ``rule(head(hidden))``, at most a chunk of logits at a time.

    The head is called as the module it is, once, with another forward: whatever gathers, casts or hooks it (FSDP, a
    tied weight in the root's group, a peft wrapper) works as for any forward. Of a head that tensor-parallel ranks share
    each rank has its own columns of the logits only.

    Args:
        head: a linear layer (out, in), or what stands for one.
        hidden: (tokens, in).
        targets: (tokens,), every one of them counts.
        rule: what the model does to the head's output.
        liger: use Liger's kernel, where the head is a plain linear layer.
    """
    split = split_head(head)
    if split is not None and liger:
        raise ValueError(
            "Liger's kernel needs the whole head, which this plan splits over tensor-parallel ranks. Set model.loss to chunked."
        )
    is_linear = type(head).forward is nn.Linear.forward  # FSDP gives it a class of its own

    def plain_forward(x: Tensor) -> Tensor:
        linear: Any = head
        x, weight, bias = _in_compute_type(x, linear.weight, linear.bias)
        if liger:
            return _liger_loss(x, weight, bias, targets)
        loss: Tensor = _ChunkedLoss.apply(x, weight, bias, targets, split)  # type: ignore[no-untyped-call]
        return loss

    original = head.forward

    def other_forward(x: Tensor) -> Tensor:
        linear: Any = head
        # As they are now: what is cast or split for a forward is not so when backward comes and recomputes.
        product = partial(functional.linear, weight=linear.weight, bias=linear.bias) if is_linear else original
        return _recomputed(lambda part: rule(product(part)), x, targets, split)

    with (
        _forward_of(head, plain_forward if is_linear and rule.is_identity else other_forward),
        split.apart() if split else nullcontext(),
    ):
        loss: Tensor = head(hidden)
    return loss


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        module.__dict__.pop("forward")
        if before is not None:
            module.__dict__["forward"] = before


def _in_compute_type(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As autocast would: the product runs in the narrow type where it is on."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x.to(weight.dtype), weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class _ChunkedLoss(torch.autograd.Function):
    """Takes the gradients while a chunk's logits are there, so that nothing is computed twice.

    Forward keeps the gradient of the hidden states (tokens, in), and where the head trains those of weight and bias, in
    FP32: a sum over chunks in bf16 would lose what one product keeps.
    """

    @staticmethod
    @override
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, split: SplitHead | None
    ) -> Tensor:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        wide = total.dtype
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs_bias else None
        with torch.autocast(x.device.type, enabled=False):
            for start in range(0, len(x), CHUNK_TOKENS):
                part, wanted = x[start : start + CHUNK_TOKENS], targets[start : start + CHUNK_TOKENS, None]
                logits = functional.linear(part, weight, bias).to(wide)
                log_sum, here = torch.logsumexp(logits, dim=-1, keepdim=True), None
                if split is not None:
                    wanted, here = split.columns(wanted, logits.shape[-1])
                picked = logits.gather(1, wanted)
                if split is not None and here is not None:
                    log_sum, picked = split.over_all(log_sum, picked.masked_fill(~here, 0.0))
                total += (log_sum - picked).sum()
                if not (needs_x or needs_weight or needs_bias):
                    continue
                gradient = logits.sub_(log_sum).exp_()
                minus_one = torch.full_like(log_sum, -1.0)
                gradient.scatter_add_(1, wanted, minus_one if here is None else minus_one * here)
                if grad_bias is not None:
                    grad_bias += gradient.sum(0)
                gradient = gradient.to(weight.dtype)
                if grad_x is not None:
                    grad_x[start : start + CHUNK_TOKENS] = gradient @ weight
                if grad_weight is not None:
                    grad_weight += gradient.T @ part
        ctx.save_for_backward(grad_x, grad_weight, grad_bias)
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    @override
    def backward(  # type: ignore[override]
        ctx: Any, grad_loss: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        grad_x, grad_weight, grad_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes

        def scaled(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
            return None if gradient is None else (gradient * grad_loss).to(dtype or gradient.dtype)

        return scaled(grad_x, None), scaled(grad_weight, weight_dtype), scaled(grad_bias, bias_dtype), None, None


def _recomputed(logits_of: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, split: SplitHead | None) -> Tensor:
    """Chunk by chunk, each recomputed in backward: right for any head, for a second product with it."""

    def chunk_loss(part: Tensor, wanted: Tensor) -> Tensor:
        logits = logits_of(part)
        wide = torch.promote_types(logits.dtype, torch.float32)
        if split is not None:
            return split.loss(logits.to(wide), wanted)
        return functional.cross_entropy(logits.to(wide), wanted, reduction="sum")

    starts = range(0, len(x), CHUNK_TOKENS) if len(x) else (0,)
    parts = [(x[start : start + CHUNK_TOKENS], targets[start : start + CHUNK_TOKENS]) for start in starts]
    losses = [checkpoint(chunk_loss, *part, use_reentrant=False) for part in parts]
    return torch.stack(losses).sum()


def has_liger() -> bool:
    """Whether Liger's kernels are installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def require_liger(loss: str) -> None:
    """Raise ValueError where Liger is asked for and cannot run."""
    if loss == "liger" and not (has_liger() and torch.cuda.is_available()):
        raise ValueError(
            "model.loss=liger needs a GPU and the package `liger-kernel`. Install it there, or set model.loss to chunked."
        )


def _liger_loss(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    if not len(x):
        return x.sum() * weight.new_zeros(())
    loss: Tensor = LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, x, targets, bias)
    return loss


def follows_rule(model: Any, rule: LogitRule) -> bool:
    """Whether ``model`` computes its logits as ``rule(head(hidden))``, tried on hidden states drawn at random.

    Only the end of its forward runs: what stands before the head is replaced for the moment. A model of which this is
    not known (an encoder-decoder, logits made otherwise) gets False. A head on meta stands in with a few random rows.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if decoder is None or decoder is model or head is None:
        return False
    width = model.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad(), _real(head, generator) as weight:
            hidden = torch.randn(1, 4, width, generator=generator, device="cpu").to(weight.device, weight.dtype)
            outputs = _Outputs(last_hidden_state=hidden)
            ids = torch.zeros(1, 4, dtype=torch.long, device=weight.device)
            with _forward_of(decoder, lambda *args, **kwargs: outputs):  # type: ignore[arg-type,return-value]
                theirs = model(input_ids=ids, use_cache=False).logits
            ours = rule(head(hidden))
    except (
        TypeError,
        AttributeError,
        KeyError,
        IndexError,
        ValueError,
        RuntimeError,
    ):  # its forward wants more than that
        return False
    return theirs.shape == ours.shape and torch.allclose(theirs.float(), ours.float(), rtol=1e-2, atol=1e-2)


@contextmanager
def _real(head: nn.Module, generator: torch.Generator) -> Iterator[Tensor]:
    """The head's weight; while the head is on meta, a few rows in its place (and in its bias's), drawn at random."""
    before = dict(head._parameters)
    try:
        for name, tensor in before.items():
            if tensor is not None and tensor.is_meta:
                rows = torch.randn(8, *tensor.shape[1:], generator=generator, device="cpu").to(tensor.dtype)
                head._parameters[name] = nn.Parameter(rows, requires_grad=False)
        yield next(head.parameters())
    finally:
        head._parameters.update(before)


class _Outputs(dict[str, Any]):
    """What a decoder returns, with nothing but hidden states."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    @override
    def __getitem__(self, key: Any) -> Any:
        return self["last_hidden_state"] if key == 0 else super().__getitem__(key)
