# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step goes: device time by kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def by_kernel(call: Callable[[], Any], repeats: int = 3, most: int = 25) -> list[dict[str, Any]]:
    """Kernels of one call, those that take longest first.

    Args:
        call: what is profiled; a replay will do.
        repeats: calls over which times are averaged.
        most: kernels listed; what is left over is one entry, "others".
    """
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    found = [
        {"kernel": event.key[:100], "launches": event.count / repeats, "us": event.self_device_time_total / repeats}
        for event in profile.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    found.sort(key=lambda one: -one["us"])
    rest = found[most:]
    listed = found[:most]
    if rest:
        listed.append(
            {
                "kernel": "others",
                "launches": sum(one["launches"] for one in rest),
                "us": sum(one["us"] for one in rest),
            }
        )
    return [{**one, "us": round(one["us"], 1)} for one in listed]
