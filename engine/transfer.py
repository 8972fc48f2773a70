"""From the host to the device, without waiting for it."""

import torch


def to_device(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """t on a device. A GPU takes it from pinned memory while the host goes on; from other memory the host would first wait for all that the GPU has to do."""
    device = torch.device(device)
    return (t.pin_memory() if device.type == "cuda" and t.device.type == "cpu" else t).to(device, non_blocking=True)
