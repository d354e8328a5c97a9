"""Decoders to try things on. What needs transformers or diffusers imports it when called."""

from omnigraph.models._code2wav import code2wav
from omnigraph.models._codecs import dac, encodec, mimi
from omnigraph.models._qwen_adapter import QwenImageAdapter
from omnigraph.models._qwen_image import qwen_image
from omnigraph.models._speech_codec import SpeechCodec, speech_codec
from omnigraph.models._tiny import TinyDecoder, tiny

__all__ = ["QwenImageAdapter", "SpeechCodec", "TinyDecoder", "code2wav", "dac", "encodec", "mimi", "qwen_image", "speech_codec", "tiny"]
