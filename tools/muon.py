"""The optimizer of inner matrices, and the type that products are fastest in. Development only."""

from __future__ import annotations

from unittest import mock

import torch

# Where the processor has no instructions for it, bfloat16 is many times slower than float32.
BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Muon(torch.optim.Muon):
    """PyTorch's, which multiplies in bfloat16; in float32 where that is faster."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        if BFLOAT16:
            return super().step(closure)
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            return super().step(closure)
