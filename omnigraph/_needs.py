"""Optional packages, imported when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_INSTALL = {
    "pandas": "pandas>=2.2",
    "plotly": "plotly>=6.1",
    "ipywidgets": "ipywidgets>=8.1",
    "anywidget": "anywidget>=0.9",
    "transformers": "transformers>=5.17",
    "diffusers": "diffusers>=0.42",
    "scipy": "scipy>=1.11",
    "tqdm": "tqdm>=4.66",
    "yaml": "pyyaml>=6",
    "safetensors": "safetensors>=0.4",
    "dask": "dask[distributed]>=2024.8",
}


def need(module: str) -> Any:
    """Import `module`, or say which command installs it.

    Raises:
        ModuleNotFoundError: it is missing; the text holds the command.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        command = f'pip install "{_INSTALL.get(package, package)}"'
        raise ModuleNotFoundError(f"this part of omnigraph needs {package}: {command}", name=package) from error
