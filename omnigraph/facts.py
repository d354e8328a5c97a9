"""What a decoder does with its frames, found out by calling it: `probe(module) -> DecoderFacts`.

A call on `n` frames gives `n * upsample - trim` samples, and sample `s` belongs to frame `(s + trim) // upsample`. So frame `k`
begins at sample `k * upsample - trim`. All calls start from the same buffers and the same random numbers, and two calls of the
same shape are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Start torch's generators for the CPU and `device` at `seed`, and put them back as they were afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.random.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


class _Subject:
    """A module that is called always from the same buffers and random numbers; `restore` leaves it as it was."""

    def __init__(self, module: nn.Module, num_quantizers: int, codebook_size: int) -> None:
        self.module, self.num_quantizers, self.codebook_size = module, num_quantizers, codebook_size
        self.random = torch.Generator().manual_seed(0)
        first = next(module.parameters(), next(module.buffers(), None))
        self.device = torch.device("cpu") if first is None else first.device
        self.training = [(m, m.training) for m in module.modules()]
        self.buffers = [(m, name, b, None if b is None else b.clone()) for m in module.modules() for name, b in m._buffers.items()]
        self.wrote = False  # a call changed a buffer
        self.channels, self.dtype = 0, torch.float32
        self.upsample, self.trim = 0, 0

    def draw(self, frames: int) -> Tensor:
        """Codes `[1, num_quantizers, frames]`, none of them 0, so that a 0 is a change."""
        return torch.randint(1, self.codebook_size, (1, self.num_quantizers, frames), generator=self.random, device="cpu")

    def change(self, codes: Tensor, first: int, last: int, to_zero: bool) -> Tensor:
        """Another code in every quantizer of the frames first:last."""
        step = torch.randint(1, self.codebook_size, codes[..., first:last].shape, generator=self.random, device="cpu")
        changed = codes.clone()
        changed[..., first:last] = 0 if to_zero else (codes[..., first:last] + step) % self.codebook_size
        return changed

    def __call__(self, codes: Tensor, seed: int = 0) -> Tensor:
        self.restore()
        self.module.eval()
        try:
            with seeded(seed, self.device):
                return self._checked(self.module(codes.to(self.device, copy=True)), codes).clone()
        except Exception as error:
            error.add_note(f"when the probe called {type(self.module).__name__} with codes {list(codes.shape)}")
            raise

    def _checked(self, audio: object, codes: Tensor) -> Tensor:
        if not isinstance(audio, Tensor):
            raise TypeError(f"a decoder must return one tensor [batch, channels, samples], this one returned a {type(audio).__name__}")
        batch, frames = codes.shape[0], codes.shape[-1]
        if audio.dim() != 3 or len(audio) != batch or not audio.numel() or not audio.is_floating_point():
            raise ValueError(
                f"a decoder must return floating point audio [{batch}, channels, samples], not empty, for codes {list(codes.shape)}; "
                f"this one returned {audio.dtype} {list(audio.shape)}"
            )
        self.channels, self.dtype = (self.channels or audio.shape[1]), (self.dtype if self.channels else audio.dtype)
        if (audio.shape[1], audio.dtype) != (self.channels, self.dtype):
            raise ValueError(f"a call gave {self.channels} channels of {self.dtype}, another {audio.shape[1]} of {audio.dtype}")
        if self.upsample and audio.shape[-1] != frames * self.upsample - self.trim:
            raise ValueError(
                f"a call on n frames must give n * upsample - trim samples; other calls say n * {self.upsample} - {self.trim}, "
                f"which is {frames * self.upsample - self.trim} for {frames} frames, but they gave {audio.shape[-1]}"
            )
        if not audio.isfinite().all():
            raise ValueError(f"{int((~audio.isfinite()).sum())} of {audio.numel()} samples are not finite, so nothing can be compared")
        return audio

    def restore(self) -> None:
        known = {(m, name) for m, name, _, _ in self.buffers}
        for m in self.module.modules():
            for name in [name for name in m._buffers if (m, name) not in known]:
                delattr(m, name)
        for m, name, buffer, value in self.buffers:
            kept = m._buffers.get(name) is buffer
            if buffer is not None and value is not None and not torch.equal(buffer, value):
                kept = False
                with torch.inference_mode():  # there an in-place change is legal for every tensor
                    buffer.copy_(value)
            if not kept:
                self.wrote = True
                m._buffers[name] = buffer
        for m, training in self.training:
            m.training = training


def _changed(before: Tensor, after: Tensor) -> tuple[int, int] | None:
    """The first and the last sample that differ, in bits."""
    at = (before != after).flatten(0, 1).any(0).nonzero()
    return (int(at[0]), int(at[-1])) if len(at) else None


def _tolerance(audio: Tensor) -> float:
    """Calls of other shapes may take other kernels: how far apart rounding may bring them, as a part of the RMS."""
    tf32 = audio.is_cuda and audio.dtype == torch.float32
    return 2 * float(2**-10 if tf32 else torch.finfo(audio.dtype).eps) ** 0.5


def _near(x: Tensor, y: Tensor, upsample: int) -> bool:
    """Whether they are the same but for rounding, in every frame."""
    limit = _tolerance(y) * float(y.double().pow(2).mean().sqrt())
    return all(float(error.pow(2).mean().sqrt()) <= limit for error in (x - y).double().split(upsample, -1))


def _lengths(call: _Subject, codes: Tensor, audio: Tensor, thorough: bool) -> dict[int, Tensor]:
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
    if frames <= 2 * least:
        raise ValueError(f"a trim of {trim} samples at {upsample} a frame needs longer calls: give frames={4 * least}")
    for n in {least, least + 1, frames // 2, frames - 2} if thorough else {least}:
        outputs[n] = call(codes[..., :n])
    return outputs


def _least(call: _Subject) -> int:
    """The fewest frames that give a sample."""
    return max(call.trim // call.upsample + 1, 1)


def _lookahead(call: _Subject, codes: Tensor, audio: Tensor, thorough: bool) -> tuple[int | None, bool]:
    """How many frames ahead a sample can see, None: no bound found; and whether any change of codes was heard at all.

    All frames from k on are changed at once, as padding does.
    """
    frames, least = codes.shape[-1], _least(call)
    starts: Sequence[int] = range(least, frames) if thorough else (least, (least + frames) // 2, frames - 1)
    trials = [(k, zero) for k in starts for zero in ((False, True) if thorough else (k == starts[1],))]
    ahead, open_ended, heard = 0, False, False
    for k, zero in trials:
        changed = _changed(audio, call(call.change(codes, k, frames, zero)))
        heard |= changed is not None
        if changed is not None and changed[0] < k * call.upsample - call.trim:
            ahead = max(ahead, k - (changed[0] + call.trim) // call.upsample)
            open_ended |= changed[0] == 0 and k + 1 not in starts  # it may reach beyond the start, or from a later frame
    return None if open_ended else ahead, heard


def _receptive_field(call: _Subject, reach: int) -> tuple[int | None, bool]:
    """How many frames back a sample can see, None: more than `reach`; and whether a chunk with that context comes out right."""
    codes = call.draw(reach + 10)
    audio = call(codes)
    back = 0
    for k, zero in ((0, False), (3, False), (4, False), (5, False), (6, True), (7, False), (7, True)):
        changed = _changed(audio, call(call.change(codes, 0, k + 1, zero)))  # all frames up to k
        if changed is not None:
            back = max(back, (changed[1] + call.trim) // call.upsample - k)
    if back > reach:
        return None, True
    skip = max(back * call.upsample - call.trim, 0)
    chunk, whole = call(codes[..., 3:])[..., skip:], audio[..., 3 * call.upsample + skip :]
    return back, _near(chunk, whole, call.upsample)


@torch.no_grad()
@torch.inference_mode(False)
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
    call = _Subject(module, quantizers, size)
    assumed = []
    try:
        codes = call.draw(frames)
        audio = call(codes)
        shorter = _lengths(call, codes, audio, reach > 0)
        lookahead, heard = _lookahead(call, codes, audio, reach > 0)
        if not heard:
            lookahead = None
            assumed.append("no change of codes changed a sample, so nothing is known of causality")
        elif lookahead is None:
            assumed.append(f"no bound was found for the lookahead in calls of {frames} frames")
        for n, short in shorter.items():
            keep = (n - (lookahead or 0)) * call.upsample - call.trim
            if lookahead is not None and keep > 0 and not _near(short[..., :keep], audio[..., :keep], call.upsample):
                lookahead = None
                assumed.append(f"the first samples of {frames} frames change when the call has {n}: no padding or chunk is safe")

        receptive_field = None
        if reach:
            receptive_field, fits = _receptive_field(call, reach)
            if not fits:
                assumed.append(f"no change of codes shows beyond {receptive_field} frames, but a chunk with this context differs from the whole")
                receptive_field = None
        else:
            assumed.append("the receptive field was not looked for (reach=0)")

        others = [call.draw(frames) for _ in range(3)]
        middle = call(torch.cat([others[0], codes, others[1]]))[1]
        rows_independent = torch.equal(middle, call(torch.cat([others[1], codes, others[2]]))[1]) and _near(middle, audio[0], call.upsample)

        deterministic = torch.equal(call(codes, seed=1), audio)
        hidden = not deterministic and not torch.equal(call(codes), audio)
        if hidden:
            assumed.append("the output differs even from the same buffers and random numbers: state elsewhere, or kernels that vary")
    finally:
        call.restore()
    assumed.append(f"an influence smaller than {call.dtype} resolves cannot be seen, nor one that only other codes or longer calls show")
    assumed.append(f"other lengths and batch sizes were taken to agree where the RMS of the difference is below {_tolerance(audio):.2g} of it")
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
