"""Decoders to try things on. What needs transformers imports it when called."""

from omnigraph.models._code2wav import code2wav
from omnigraph.models._codecs import dac, encodec, mimi
from omnigraph.models._tiny import TinyDecoder, tiny

__all__ = ["TinyDecoder", "code2wav", "dac", "encodec", "mimi", "tiny"]
