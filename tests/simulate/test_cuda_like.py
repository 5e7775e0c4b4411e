"""What the CPU keeps for backward inside the patches is what CUDA keeps."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_shard._compat import fake_tensor_mode
from lightning_shard.simulate.autocast import autocast_as_cuda
from lightning_shard.simulate.cuda_like import allocate_as_cuda
from lightning_shard.simulate.tracker import Tracker

TOKENS, WIDTH = 128, 64


def kept_bytes(function: object, *, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that the graph of ``function(x)`` keeps beside x and its output."""
    with fake_tensor_mode(), allocate_as_cuda():
        x = torch.zeros(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
        with Tracker() as tracker:
            output = function(x)  # type: ignore[operator]
            own = output.numel() * output.element_size()
            return tracker.allocated_bytes - own


def test_dropout_keeps_one_byte_per_element() -> None:
    assert kept_bytes(lambda x: functional.dropout(x, 0.1)) == TOKENS * WIDTH
    assert kept_bytes(nn.Dropout(0.1)) == TOKENS * WIDTH


def test_dropout_that_is_off_keeps_nothing() -> None:
    assert kept_bytes(lambda x: functional.dropout(x, 0.1, training=False) * 1) == 0


def test_attention_with_dropout_keeps_no_scores() -> None:
    def attention(x: Tensor) -> Tensor:
        heads = x.view(1, TOKENS, 4, 16).transpose(1, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1, is_causal=True)

    log_sum_exp = 4 * TOKENS * 4
    assert kept_bytes(attention) == log_sum_exp


def test_rms_norm_keeps_one_number_per_row() -> None:
    norm = nn.RMSNorm(WIDTH, dtype=torch.bfloat16)
    assert kept_bytes(lambda x: functional.rms_norm(x, (WIDTH,), None, 1e-6)) == TOKENS * 4
    with fake_tensor_mode():
        norm = nn.RMSNorm(WIDTH, dtype=torch.bfloat16)
    assert kept_bytes(norm) == TOKENS * 4


def test_autocast_runs_softmax_and_norms_in_fp32() -> None:
    with autocast_as_cuda(torch.bfloat16):
        x = torch.zeros(2, 4, dtype=torch.bfloat16)
        assert functional.softmax(x, -1).dtype is torch.float32
        assert functional.layer_norm(x, (4,)).dtype is torch.float32
        assert (x.float() @ x.float().t()).dtype is torch.bfloat16
    assert functional.softmax(x, -1).dtype is torch.bfloat16


def test_patches_leave_nothing_behind() -> None:
    before = (functional.dropout, functional.rms_norm, functional.scaled_dot_product_attention, torch.dropout)
    with allocate_as_cuda():
        assert functional.dropout is not before[0]
    after = (functional.dropout, functional.rms_norm, functional.scaled_dot_product_attention, torch.dropout)
    assert before == after
