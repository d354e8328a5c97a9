"""CUDA graphs for neural decoders: choose buckets, capture, replay, verify. By convention `import omnigraph as og`."""

from __future__ import annotations

from omnigraph import models
from omnigraph._files import FileError
from omnigraph._pool import Pool
from omnigraph._warmup import BucketReport, CaptureReport
from omnigraph.compare import Comparison, verify
from omnigraph.decoder import GraphedDecoder
from omnigraph.driving import Driven, drive
from omnigraph.facts import DecoderFacts, probe
from omnigraph.graph import CapturedGraph, CaptureError, capture
from omnigraph.shapes import Bucket, BucketPlan, Route, Shape, route
from omnigraph.stats import Fallback, Outcome, ReplayStats
from omnigraph.trace import Trace

__version__ = "0.1.0"

__all__ = [
    "Bucket",
    "BucketPlan",
    "BucketReport",
    "CaptureError",
    "CaptureReport",
    "CapturedGraph",
    "Comparison",
    "DecoderFacts",
    "Driven",
    "Fallback",
    "FileError",
    "GraphedDecoder",
    "Outcome",
    "Pool",
    "ReplayStats",
    "Route",
    "Shape",
    "Trace",
    "capture",
    "drive",
    "models",
    "probe",
    "route",
    "verify",
]
