from __future__ import annotations

import json
import re
from itertools import accumulate

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from omnigraph._export import from_vllm, from_wrapper, to_vllm, to_wrapper
from omnigraph._vllm_omni import VllmOmni, from_vllm_omni, to_vllm_omni
from omnigraph.shapes import BucketPlan, Shape
from omnigraph.trace import Trace

sizes = st.integers(1, 400)
plans = st.builds(
    lambda plain, compiled: BucketPlan(tuple(plain), tuple(compiled)),
    st.sets(st.builds(Shape, st.integers(1, 16), sizes), min_size=1, max_size=9),
    st.sets(st.builds(Shape, st.integers(1, 16), sizes), max_size=3),
)

DEPLOYED = """
connectors:
  connector_of_shared_memory:
    name: SharedMemoryConnector
    extra:
      shm_threshold_bytes: 65536
      codec_chunk_frames: 25
      codec_left_context_frames: 72
      codec_chunk_ramp: [4, 4, 8, 16, 25]
      decode_chunk_frames: 300
      decode_left_context_frames: 25
      decode_cudagraph_capture_sizes: [25, 97, 325]
      decode_cudagraph_batch_sizes: [1, 4]
      decode_batch_max_size: 8
  other:
    extra: {port: 1}
"""


def test_a_deploy_file_reads() -> None:
    assert from_vllm_omni(DEPLOYED) == VllmOmni(25, 72, (4, 4, 8, 16, 25), 300, 25, (25, 97, 325), (1, 4), 8)
    assert from_vllm_omni(DEPLOYED.replace("[4, 4, 8, 16, 25]", '"4, 4,8,16 ,25"')).ramp == (4, 4, 8, 16, 25)
    assert from_vllm_omni(DEPLOYED.replace("codec_chunk_ramp: [4, 4, 8, 16, 25]", "initial_codec_chunk_frames: 1")).ramp == (1,)


@given(
    plan=plans,
    chunk=sizes,
    context=st.integers(0, 100),
    ramp=st.lists(st.integers(1, 50), max_size=5),
    streaming=st.booleans(),
    most=st.none() | st.integers(1, 64),
)
def test_what_is_written_reads_back(plan: BucketPlan, chunk: int, context: int, ramp: list[int], streaming: bool, most: int | None) -> None:
    done = to_vllm_omni(plan, chunk_size=chunk, left_context_size=context, ramp=ramp, streaming=streaming, max_batch=most)
    again = from_vllm_omni(done.text)
    shapes = {*plan.plain, *plan.compiled}
    assert (again.chunk_size, again.left_context_size, again.ramp) == (chunk, context, tuple(ramp))
    assert {Shape(b, f) for b in again.batch_sizes for f in again.sizes} >= shapes
    assert again.max_batch == most, "a limit on batches is the user's to set"
    assert again.plan(streaming=streaming) == done.plan
    lost = re.findall(r"\d+x\d+", " ".join(loss for loss in done.losses if loss.startswith("not captured")))
    assert {str(s) for s in shapes - set(done.plan.plain)} == set(lost), "every bucket that is not captured is named, no other"
    assert from_vllm_omni(str(done)) == again, "the losses are comments"


@given(chunk=st.integers(1, 40), context=st.integers(0, 80), ramp=st.lists(st.integers(1, 30), max_size=5))
def test_streaming_sizes_are_the_lengths_of_full_chunks(chunk: int, context: int, ramp: list[int]) -> None:
    """Requests that end with a full chunk make calls of these lengths and no other."""
    ends = list(accumulate([*ramp, *[chunk] * (context // chunk + 3)]))
    calls = Trace([0.0] * len(ends), ends).calls(chunk, context, ramp)
    assert VllmOmni(chunk, context, tuple(ramp)).streaming_sizes == tuple(s.frames for s in calls)


def test_losses_in_words() -> None:
    plan = BucketPlan((Shape(1, 50), Shape(4, 25)), (Shape(1, 97),))
    whole = to_vllm_omni(plan, chunk_size=25, left_context_size=72, streaming=False)
    assert whole.plan == BucketPlan.grid([1, 4], [25, 50, 97, 150, 325])
    assert whole.losses == (
        "captured plain, not compiled: 1x97",
        "captured besides: 1x25 1x150 1x325 4x50 4x97 4x150 4x325",
    )
    stream = to_vllm_omni(plan, chunk_size=25, left_context_size=72, streaming=True)
    assert stream.plan == BucketPlan.grid([1, 4], [25, 50, 75, 97])
    assert stream.losses == (
        "when it streams, vLLM-Omni captures the lengths of full chunks with their context, [25, 50, 75, 97], "
        "whatever decode_cudagraph_capture_sizes says: that is for whole utterances",
        "captured plain, not compiled: 1x97",
        "captured besides: 1x25 1x75 4x50 4x75 4x97",
    )
    exact = to_vllm_omni(BucketPlan.grid([1], [25, 150, 325]), chunk_size=25, left_context_size=25, streaming=False)
    assert exact.losses == ()


def test_the_fragment() -> None:
    text = to_vllm_omni(BucketPlan.grid([1], [25, 97]), chunk_size=25, left_context_size=72, ramp=[1]).text
    assert yaml.safe_load(text) == {
        "connectors": {
            "connector_of_shared_memory": {
                "extra": {
                    "codec_chunk_frames": 25,
                    "codec_left_context_frames": 72,
                    "initial_codec_chunk_frames": 1,
                    "decode_chunk_frames": 300,
                    "decode_left_context_frames": 25,
                    "decode_cudagraph_capture_sizes": [25, 97],
                    "decode_cudagraph_batch_sizes": [1],
                }
            }
        }
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("3", "found none"),
        ("connectors: {a: {extra: {port: 1}}}", "found none"),
        ("connectors: {a: {extra: {codec_chunk_frames: 5}}, b: {extra: {codec_chunk_frames: 5}}}", "found ['a', 'b']"),
        ("connectors: {a: {extra: {codec_chunk_frames: many}}}", "codec_chunk_frames must be whole numbers, got 'many'"),
        ("connectors: {a: {extra: {codec_chunk_frames: 2.5}}}", "whole numbers, got 2.5"),
        ("connectors: {a: {extra: {codec_chunk_ramp: [4, 0]}}}", "got ramp in"),
        ("connectors: {a: {extra: {codec_chunk_frames: -4}}}", "got chunk_size in"),
    ],
)
def test_bad_deploy_files(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        from_vllm_omni(text)


def test_one_of_several_connectors() -> None:
    text = "connectors: {a: {extra: {codec_chunk_frames: 5}}, b: {extra: {codec_chunk_frames: 6}}}"
    assert from_vllm_omni(text, "b").chunk_size == 6


@given(plans)
def test_wrapper_arguments_say_all_of_a_plan(plan: BucketPlan) -> None:
    arguments, losses = to_wrapper(plan)
    assert from_wrapper(**arguments) == plan
    assert losses


def test_what_the_wrapper_sends_eager_is_told() -> None:
    """Its next size for 1x20 is 25, and 1x25 is not captured: eager, though 1x50 would hold it."""
    assert to_wrapper(BucketPlan((Shape(1, 50), Shape(4, 25))))[1] == (
        "calls of batch 1 whose next size is one of [25] go eager: it does not look for a longer bucket",
        "calls of a batch size without buckets of its own go eager: it neither pads nor splits a batch",
    )


def test_vllm() -> None:
    done = to_vllm(BucketPlan((Shape(1, 50), Shape(2, 25), Shape(4, 25)), (Shape(1, 25),)))
    assert json.loads(done.text) == {"cudagraph_capture_sizes": [25, 50, 100]}
    assert len(done.losses) == 2
    assert from_vllm(done.text) == done.plan == BucketPlan.grid([1], [25, 50, 100])
    assert from_vllm("compilation_config: {cudagraph_capture_sizes: [4, 8]}") == BucketPlan.grid([1], [4, 8])
    assert to_vllm(BucketPlan.grid([1], [4])).losses == ()
    with pytest.raises(ValueError, match="found none"):
        from_vllm("{}")
