"""CUDA graphs for neural decoders: choose buckets, capture, replay, verify. By convention `import omnigraph as og`."""

from __future__ import annotations

from omnigraph import models
from omnigraph._export import Exported, from_vllm, from_wrapper, to_vllm, to_wrapper
from omnigraph._files import FileError
from omnigraph._pool import Pool
from omnigraph._vllm_omni import VllmOmni, from_vllm_omni, to_vllm_omni
from omnigraph._warmup import BucketReport, CaptureReport
from omnigraph.chunks import Chunk, Chunking, schedule
from omnigraph.compare import Comparison, verify
from omnigraph.decoder import GraphedDecoder
from omnigraph.driving import Driven, drive
from omnigraph.facts import DecoderFacts, probe
from omnigraph.graph import CapturedGraph, CaptureError, capture
from omnigraph.planner import PlanReport, plan_buckets
from omnigraph.prefix import DecodeAdapter, DecodeBuffers, DecodeGraphCache, DecodeGraphKey, Prefix
from omnigraph.profile import Profile
from omnigraph.serving import Served, load_curve, saturates_at, settle, simulate
from omnigraph.shapes import Bucket, BucketPlan, Route, Shape, route
from omnigraph.stats import Fallback, Outcome, ReplayStats
from omnigraph.streaming import StreamSession
from omnigraph.sweeping import Job, sweep
from omnigraph.trace import Trace, load_calls, save_calls
from omnigraph.widgets import explore

__version__ = "0.1.0"

__all__ = [
    "Bucket",
    "BucketPlan",
    "BucketReport",
    "CaptureError",
    "CaptureReport",
    "CapturedGraph",
    "Chunk",
    "Chunking",
    "Comparison",
    "DecodeAdapter",
    "DecodeBuffers",
    "DecodeGraphCache",
    "DecodeGraphKey",
    "DecoderFacts",
    "Driven",
    "Exported",
    "Fallback",
    "FileError",
    "GraphedDecoder",
    "Job",
    "Outcome",
    "PlanReport",
    "Pool",
    "Prefix",
    "Profile",
    "ReplayStats",
    "Route",
    "Served",
    "Shape",
    "StreamSession",
    "Trace",
    "VllmOmni",
    "capture",
    "drive",
    "explore",
    "from_vllm",
    "from_vllm_omni",
    "from_wrapper",
    "load_calls",
    "load_curve",
    "models",
    "plan_buckets",
    "probe",
    "route",
    "saturates_at",
    "save_calls",
    "schedule",
    "settle",
    "simulate",
    "sweep",
    "to_vllm",
    "to_vllm_omni",
    "to_wrapper",
    "verify",
]
