"""The dashboard on a GPU: measure, play a trace, and apply plans while it plays."""

from __future__ import annotations

import time

import pytest
import torch

import omnigraph as og

pytestmark = pytest.mark.gpu
for needed in ("pandas", "plotly", "ipywidgets", "anywidget"):
    pytest.importorskip(needed)


def test_measure_play_and_apply_while_it_plays() -> None:
    module = og.models.code2wav("small", device="cuda")
    trace = og.Trace.synthesise(requests=200, rate=20, mean_frames=60, max_frames=200)
    with og.GraphedDecoder(module, og.BucketPlan.grid([1], [25])) as decoder:
        decoder.warmup(strict=True)
        panel = og.explore(decoder, trace)
        try:
            panel.measure()
            look = panel.settled(120)
            assert look.prediction is not None, panel.frame.message.value
            player = panel.play(speed=4)
            time.sleep(1)
            for sizes in ([8, 16, 25, 50], [25, 32, 50], [10, 50]):
                plan = og.BucketPlan.grid([1], sizes)
                panel.apply(plan)
                panel.settled(120)
                assert set(decoder.captured) == set(plan.buckets), panel.frame.message.value
                assert panel.applied[-1].driven is not None, panel.applied[-1].problem
                panel.measure()
                panel.settled(120)
                assert "Measured" in panel.frame.message.value, panel.frame.message.value
            panel.stop()
            assert len(player.captures) >= 3
            for frames in (10, 25, 41, 50, 60):
                codes = torch.randint(0, decoder.codebook_size, (1, decoder.num_quantizers, frames), device="cuda")
                with torch.no_grad():
                    torch.testing.assert_close(decoder.decode(codes), module(codes), rtol=1e-2, atol=1e-3)
        finally:
            panel.close()
