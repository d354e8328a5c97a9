"""What a decoder does with its frames, found out by calling it: `probe(module) -> DecoderFacts`.

A call on `n` frames gives `n * upsample - trim` samples, and sample `s` belongs to frame `(s + trim) // upsample`. So frame `k`
begins at sample `k * upsample - trim`. All calls start from the same buffers and the same random numbers, and two calls of the
same shape are compared bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from omnigraph._subject import Subject

REACH = 96  # frames of left context; the widest attention window among the decoders in use is 72


@dataclass(frozen=True, slots=True)
class DecoderFacts:
    """What `probe` found out about a decoder.

    Arguments:
        upsample, trim: a call on `n` frames gives `n * upsample - trim` samples.
        causal: changing frame k leaves the first `k * upsample - trim` samples as they were, and so does leaving it out.
        lookahead: frames of right context that a sample depends on; None where no bound was found.
        receptive_field: frames of left context that make a chunk right; None: more than `reach`.
        deterministic: the same codes from the same state give the same bits.
        stateful: a call leaves something behind, in a buffer or elsewhere, that the probe saw.
        rows_independent: a row of a batch is decoded as if it were alone.
        assumed: what the probe could not establish, and what it took for granted, a sentence each.
    """

    num_quantizers: int
    codebook_size: int
    channels: int
    upsample: int
    trim: int
    causal: bool
    lookahead: int | None
    receptive_field: int | None
    reach: int
    deterministic: bool
    stateful: bool
    rows_independent: bool
    assumed: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32

    def samples(self, frames: int) -> int:
        """How many samples a call on `frames` frames gives."""
        return max(frames * self.upsample - self.trim, 0)


def code_space(module: nn.Module, num_quantizers: int | None = None, codebook_size: int | None = None) -> tuple[int, int]:
    """`(num_quantizers, codebook_size)` as given, or as the module or its config says.

    Raises:
        ValueError: nobody says, or what was said is no positive integer.
    """

    def read(name: str, given: int | None) -> int:
        for source in (module, getattr(module, "config", None)):
            given = getattr(source, name, None) if given is None else given
        if given is None:
            raise ValueError(f"neither {type(module).__name__} nor its config has {name}: pass {name}=")
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise ValueError(f"{name} must be a positive integer, got {given!r}")
        return given

    return read("num_quantizers", num_quantizers), read("codebook_size", codebook_size)


def _changed(before: Tensor, after: Tensor) -> tuple[int, int] | None:
    """The first and the last sample that differ, in bits."""
    at = (before != after).flatten(0, 1).any(0).nonzero()
    return (int(at[0]), int(at[-1])) if len(at) else None


def _tolerance(audio: Tensor) -> float:
    """Calls of other shapes may take other kernels: how far apart rounding may bring them, as a part of the RMS."""
    least = 2**-10 if audio.is_cuda and audio.dtype == torch.float32 else 2**-23  # tf32; and float64 models compute parts in float32
    return 2 * sqrt(max(torch.finfo(audio.dtype).eps, least))


def _near(x: Tensor, y: Tensor, upsample: int) -> bool:
    """Whether they are the same but for rounding, in every frame."""
    limit = _tolerance(y) * float(y.double().pow(2).mean().sqrt())
    return all(float(error.pow(2).mean().sqrt()) <= limit for error in torch.split((x - y).double(), upsample, -1))


def _lengths(call: Subject, codes: Tensor, audio: Tensor, thorough: bool) -> dict[int, Tensor]:
    """Find `call.upsample` and `call.trim`; the outputs of the first n frames of `codes`, by n.

    Raises:
        ValueError: the lengths are not on one line.
    """
    frames = codes.shape[-1]
    outputs = {frames - 1: call(codes[..., :-1])}
    upsample = audio.shape[-1] - outputs[frames - 1].shape[-1]
    trim = frames * upsample - audio.shape[-1]
    if upsample < 1:
        raise ValueError(
            f"a call on n frames must give n * upsample - trim samples; this decoder gave {audio.shape[-1]} for {frames} frames, "
            f"and {outputs[frames - 1].shape[-1]} for {frames - 1}"
        )
    call.upsample, call.trim = upsample, trim
    least = _least(call)
    lengths = {least, least + 1, frames // 2, frames - 2} if thorough else {least}
    outputs |= {n: call(codes[..., :n]) for n in sorted(lengths) if least <= n < frames - 1}
    if frames <= 2 * least:
        raise ValueError(f"a trim of {trim} samples at {upsample} a frame needs longer calls: give frames={4 * least}")
    return outputs


def _least(call: Subject) -> int:
    """The fewest frames that give a sample."""
    return max(call.trim // call.upsample + 1, 1)


def _lookahead(call: Subject, codes: Tensor, audio: Tensor, thorough: bool) -> tuple[int | None, bool]:
    """How many frames ahead a sample can see, None: no bound found; and whether any change of codes was heard at all.

    All frames from k on are changed at once, as padding does; for every k if `thorough`, or when three of them show a lookahead.
    """
    frames, least = codes.shape[-1], _least(call)
    middle = (least + frames) // 2
    trials = [(least, False), (middle, True), (frames - 1, False)]
    if thorough:
        trials = [(k, zero) for k in range(least, frames) for zero in (False, True)]
    ahead, open_ended, heard = 0, False, False
    for k, zero in trials:
        changed = _changed(audio, call(call.change(codes, k, frames, zero)))
        if changed is not None:
            heard = True
            ahead = max(ahead, k - (changed[0] + call.trim) // call.upsample)
            open_ended |= changed[0] == 0 and k == frames - 1
    if ahead and not thorough:
        return _lookahead(call, codes, audio, True)
    return None if open_ended else ahead, heard


def _receptive_field(call: Subject, reach: int, steady: bool) -> tuple[int | None, bool]:
    """How many frames back a sample can see, None: more than `reach`; and whether a chunk with that context comes out right."""
    least = _least(call)
    codes = call.draw(least + reach + 10)
    audio = call(codes)
    back = 0
    for k, zero in ((0, False), (3, False), (4, False), (5, False), (6, True), (7, False), (7, True)):
        changed = _changed(audio, call(call.change(codes, 0, least + k + 1, zero)))  # all frames up to least + k
        if changed is not None:
            back = max(back, (changed[1] + call.trim) // call.upsample - least - k)
    if back > reach or not steady:
        return (None if back > reach else back), True
    skip = max(back * call.upsample - call.trim, 0)
    chunk, whole = call(codes[..., 3:])[..., skip:], audio[..., 3 * call.upsample + skip :]
    return back, _near(chunk, whole, call.upsample)


@torch.inference_mode(False)  # which turns gradients on
@torch.no_grad()
def probe(
    module: nn.Module,
    *,
    num_quantizers: int | None = None,
    codebook_size: int | None = None,
    reach: int = REACH,
    frames: int = 16,
) -> DecoderFacts:
    """Find out what padding, batching and chunking may rely on, by changing codes and looking at which samples change.

    The module is called in eval mode, without gradients. Its buffers, its modes and torch's generators are left as they were.

    Arguments:
        num_quantizers, codebook_size: read off the module or its config unless given.
        reach: look for the receptive field up to this many frames; 0: don't, and make do with nine calls for the rest.
        frames: the length of the calls for the rest; a lookahead is found if it is shorter.

    Raises:
        ValueError: the output is not audio `[batch, channels, n * upsample - trim]`, or nobody says which codes there are.
        TypeError: the output is not a tensor.

    >>> from omnigraph.models import tiny
    >>> facts = probe(tiny(upsample=8, trim=3, receptive_field=5), reach=10)
    >>> facts.upsample, facts.trim, facts.causal, facts.lookahead, facts.receptive_field
    (8, 3, True, 0, 5)
    """
    quantizers, size = code_space(module, num_quantizers, codebook_size)
    if reach < 0 or frames < 4 or size < 2:
        raise ValueError(f"a probe needs reach >= 0, frames >= 4 and a codebook_size >= 2; got {reach}, {frames} and {size}")
    call = Subject(module, quantizers, size)
    assumed = []
    try:
        codes = call.draw(frames)
        audio = call(codes)
        shorter = _lengths(call, codes, audio, reach > 0)
        deterministic = torch.equal(call(codes, seed=1), audio)
        hidden = not deterministic and not torch.equal(call(codes), audio)
        if hidden:
            assumed.append("the output differs even from the same buffers and random numbers: state elsewhere, or kernels that vary")
        elif not deterministic:
            assumed.append("the output is random, so calls of different shapes were not compared")

        lookahead, heard = _lookahead(call, codes, audio, reach > 0)
        if not heard:
            lookahead = None
            assumed.append("no change of codes changed a sample, so nothing is known of causality")
        elif lookahead is None:
            assumed.append(f"no bound was found for the lookahead in calls of {frames} frames")
        for n, short in shorter.items():
            keep = (n - (lookahead or 0)) * call.upsample - call.trim
            if deterministic and lookahead is not None and keep > 0 and not _near(short[..., :keep], audio[..., :keep], call.upsample):
                lookahead = None
                assumed.append(f"the first samples of {frames} frames are others when the call has {n}: no padding or chunk is safe")

        receptive_field = None
        if reach:
            receptive_field, fits = _receptive_field(call, reach, deterministic)
            if not fits:
                assumed.append(f"no code shows beyond {receptive_field} frames, but a chunk with this left context differs from the whole")
                receptive_field = None
        else:
            assumed.append("the receptive field was not looked for (reach=0)")

        zeros = torch.zeros_like(codes)
        row = call(torch.cat([call.draw(frames), codes, call.draw(frames)]))[1]
        rows_independent = torch.equal(row, call(torch.cat([zeros, codes, zeros]))[1])
        rows_independent &= not deterministic or _near(row, audio[0], call.upsample)
    finally:
        call.restore()
    assumed.append(f"an influence below the resolution of {call.dtype} was not seen, nor one that needs other codes or longer calls")
    assumed.append(f"calls of other shapes count as equal where they differ by less than {_tolerance(audio):.2g} of the RMS")
    return DecoderFacts(
        num_quantizers=quantizers,
        codebook_size=size,
        channels=call.channels,
        upsample=call.upsample,
        trim=call.trim,
        causal=lookahead == 0,
        lookahead=lookahead,
        receptive_field=receptive_field,
        reach=reach,
        deterministic=deterministic,
        stateful=call.wrote or hidden,
        rows_independent=rows_independent,
        assumed=tuple(assumed),
        dtype=call.dtype,
    )
