"""Device memory of one call."""

from __future__ import annotations

import torch

from bench.cuda_timing import Call


def peak_mib(call: Call, given_bytes: int, device: torch.device) -> float | None:
    """Memory at the highest point of ``call`` in MiB; None where torch does not count it.

    Args:
        call: has run before, so that it allocates nothing that stays.
        given_bytes: what the call is given, its image and grad_output, in bytes: counted with what
            it allocates. Parameters and what lies beside them are not.
        device: where it runs.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    allocated = torch.cuda.max_memory_allocated(device) - before
    return (allocated + given_bytes) / 2**20
