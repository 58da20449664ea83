"""State: it keeps its own precision, is loaded as a whole or not at all, and so is it written."""

from __future__ import annotations

import _signal  # the enums of `signal` cost as much as ten operations
import io
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


def pack(state: Any) -> Tensor:
    """A state as a tensor of bytes: safetensors can hold it, `torch.load` needs no pickled code."""
    stream = io.BytesIO()
    torch.save(state, stream)
    return torch.frombuffer(bytearray(stream.getbuffer()), dtype=torch.uint8)


def unpack(packed: Tensor) -> Any:
    """What was packed, on the CPU."""
    stream = io.BytesIO(packed.cpu().numpy().tobytes())
    return torch.load(stream, map_location="cpu", weights_only=True)


class CheckedState(nn.Module):
    """A module that loads a whole state or refuses it and changes nothing.

    torch writes module by module and complains afterwards. Here the outermost module that is
    loaded looks at the state of all modules below it before anything is written.
    """

    may_be_nan: ClassVar[tuple[str, ...]] = ()
    """Buffers in which NaN means that there is no value yet."""

    never_negative: ClassVar[tuple[str, ...]] = ()
    """Buffers of sums, counts and squares."""

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if no training can have led to this state, which may be incomplete."""
        for name, own in self.named_buffers(recurse=False):
            if (found := state.get(name)) is None:
                continue
            if found.shape != own.shape:
                shape, wanted = tuple(found.shape), tuple(own.shape)
                raise ValueError(f"`{name}` has shape {shape} instead of {wanted}.")
            if found.is_floating_point() != own.is_floating_point():
                raise ValueError(f"`{name}` has dtype {found.dtype} instead of {own.dtype}.")
            bad = found.isinf() if name in self.may_be_nan else ~found.isfinite()
            if bool(bad.any()):
                raise ValueError(f"`{name}` holds NaN or infinite values.")
            if name in self.never_negative and bool((found < 0).any()):
                raise ValueError(f"`{name}` holds negative numbers.")

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: Any
    ) -> None:
        call, expected = f"`{type(self).__name__}.load_state_dict`", self.state_dict(prefix=prefix)
        given = [key for key in state_dict if key.startswith(prefix)]
        for what, keys in {
            "missing": [key for key in expected if key not in state_dict and strict],
            "unexpected": [key for key in given if key not in expected and strict],
            "no tensor": [key for key in given if not isinstance(state_dict[key], Tensor)],
        }.items():
            if keys:
                raise RuntimeError(f"{call}: {what}: {', '.join(keys)}. Nothing was loaded.")
        for path, module in self.named_modules():
            if isinstance(module, CheckedState):
                start = f"{prefix}{path}." if path else prefix
                own = {k.removeprefix(start): state_dict[k] for k in given if k.startswith(start)}
                try:
                    module.check_state(own)
                except Exception as error:  # of torch.load too, for bytes that are none of its
                    raise RuntimeError(f"{call}: {start}{error} Nothing was loaded.") from error
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)


class KeepsPrecision(CheckedState):
    """A module whose own float buffers follow `.to(device)` but are never narrowed.

    A model may run in bfloat16; a moving average may not, because steps of a thousandth vanish in
    its 8 bits. `.double()` still widens.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, after in list(self.named_buffers(recurse=False)):
            wide = before[name]
            if wide.is_floating_point() and after.dtype.itemsize < wide.dtype.itemsize:
                setattr(self, name, wide.to(after.device))
        return self


class Uninterrupted:
    """A `with` block in which Ctrl-C waits for the end of the block.

    For the few lines that write several tensors: half of them written would be a state that no
    training has. Python calls handlers of signals in the main thread alone.
    """

    def __enter__(self) -> None:
        self._held: list[Any] = []
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            # Others are not Python's: they end the process, ignore Ctrl-C or belong to a library.
            self._before = _signal.getsignal(_signal.SIGINT)
            if callable(self._before):
                _signal.signal(_signal.SIGINT, lambda *received: self._held.append(received))

    def __exit__(self, *error: object) -> None:
        if callable(self._before):
            _signal.signal(_signal.SIGINT, self._before)
            if self._held:
                self._before(*self._held[0])
