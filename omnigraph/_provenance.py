"""Where a number comes from: the device, versions, model and commit that a saved result carries."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def device_name(device: torch.device) -> str:
    """The device in words, such as "NVIDIA H200" or "cpu (x86_64, 2 threads)"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"


def _config(module: torch.nn.Module) -> dict[str, Any]:
    config: Any = getattr(module, "config", None)
    listed = (
        config.to_dict()
        if hasattr(config, "to_dict")
        else dict(config)
        if isinstance(config, dict)
        else dict(getattr(config, "__dict__", {}))
    )
    return {k: v for k, v in sorted(listed.items()) if not k.startswith("_") and k not in ("transformers_version", "dtype")}


def identity(module: torch.nn.Module) -> dict[str, str]:
    """Which model, config, dtype and device a plan or a profile is made for.

    `config` is the first 12 digits of the SHA-256 of the module's config, parameter names and shapes.
    """
    first = next(module.parameters(), None)
    shapes = [(name, list(p.shape)) for name, p in module.named_parameters()]
    digest = hashlib.sha256(json.dumps([_config(module), shapes], sort_keys=True, default=str).encode()).hexdigest()
    return {
        "model": type(module).__name__,
        "config": digest[:12],
        "dtype": "none" if first is None else str(first.dtype).removeprefix("torch."),
        "device": "cpu" if first is None else device_name(first.device),
    }


def differences(made_for: dict[str, str], module: torch.nn.Module) -> list[str]:
    """What differs between what a result was made for and `module`, a sentence each; empty where nothing does."""
    now = identity(module)
    return [f"{key} {made_for[key]!r}, here it is {now[key]!r}" for key in now if key in made_for and made_for[key] != now[key]]


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _commit() -> str:
    """The commit of this checkout; OMNIGRAPH_COMMIT where the files were copied without one."""
    if given := os.environ.get("OMNIGRAPH_COMMIT"):
        return given
    try:
        here = Path(__file__).parent
        command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def provenance(module: torch.nn.Module | None = None, *, method: str) -> dict[str, str]:
    """What a saved result must carry: device, driver, versions, model, dtype, config, method, commit and date (UTC)."""
    import omnigraph  # late: for its version alone

    first = next(module.parameters(), None) if module is not None else None
    device = first.device if first is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = {"device": device_name(device)} if module is None else identity(module)
    if module is not None:
        about["parameters"] = str(sum(p.numel() for p in module.parameters()))
    return {
        **about,
        "driver": _driver() if device.type == "cuda" else "none",
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "omnigraph": omnigraph.__version__,
        "method": method,
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
