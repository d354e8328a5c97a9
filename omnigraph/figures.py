"""Figures from DataFrames: each a plain `plotly` figure with units on its axes and the source of its numbers under its title."""

from __future__ import annotations

from omnigraph._call_figures import call_timeline, hit_map, latency_by_shape, latency_distribution, outcomes_by_frames
from omnigraph._chunk_figures import first_audio, packing, seams
from omnigraph._compile_figures import beside, compile_seconds, kernels_by_time
from omnigraph._drawing import COLOURS, ERRORS, KINDS
from omnigraph._error_figures import error_by_context, error_map, snr_by_frame
from omnigraph._load_figures import predicted_against_measured, service_by_load
from omnigraph._plan_figures import (
    bucket_costs,
    budget_curve,
    calls_histogram,
    gain_curve,
    memory_by_bucket,
    padded_work_by_bucket,
    profile_curves,
    side_by_side,
    speedup_curves,
)
from omnigraph._speed_figures import H200_BF16, Peaks, bytes_by_kind, cost_per_frame, host_costs, roofline, time_bounds

__all__ = [
    "COLOURS",
    "ERRORS",
    "H200_BF16",
    "KINDS",
    "Peaks",
    "beside",
    "bucket_costs",
    "budget_curve",
    "bytes_by_kind",
    "call_timeline",
    "calls_histogram",
    "compile_seconds",
    "cost_per_frame",
    "error_by_context",
    "error_map",
    "first_audio",
    "gain_curve",
    "hit_map",
    "host_costs",
    "kernels_by_time",
    "latency_by_shape",
    "latency_distribution",
    "memory_by_bucket",
    "outcomes_by_frames",
    "packing",
    "padded_work_by_bucket",
    "predicted_against_measured",
    "profile_curves",
    "roofline",
    "seams",
    "service_by_load",
    "side_by_side",
    "snr_by_frame",
    "speedup_curves",
    "time_bounds",
]
