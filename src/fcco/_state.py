"""State: it keeps its own precision, and is checked as a whole before any of it is loaded."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

__all__ = ["CheckedState", "KeepsPrecision", "pack", "unpack"]


def pack(state: Any) -> Tensor:
    """Anything that `torch.load` takes without pickled code, as a tensor of bytes.

    Files of tensors (safetensors) can then hold it.
    """
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

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if no training can have led to this state.

        Args:
            state: what it holds for this module, and for modules below it, as far as it is there.
        """
        for name, own in self._buffers.items():
            found = state.get(name)
            if own is None or found is None:
                continue
            if not isinstance(found, Tensor) or found.shape != own.shape:
                shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise ValueError(f"`{name}` has shape {shape} instead of {tuple(own.shape)}.")
            if found.is_floating_point() != own.is_floating_point():
                raise ValueError(f"`{name}` has dtype {found.dtype} instead of {own.dtype}.")
            bad = found.isinf() if name in self.may_be_nan else ~found.isfinite()
            if bool(bad.any()):
                raise ValueError(f"`{name}` holds NaN or infinite values.")

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: Any
    ) -> None:
        call, left = f"`{type(self).__name__}.load_state_dict`", set(state_dict)
        for path, module in self.named_modules():
            start = f"{prefix}{path}." if path else prefix
            names = [
                name
                for name, buffer in module._buffers.items()
                if buffer is not None and name not in module._non_persistent_buffers_set
            ]
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                names.append("_extra_state")
            keys = {name: start + name for name in names}
            missing = [key for key in keys.values() if key not in state_dict]
            if missing and strict:
                raise RuntimeError(f"{call}: missing: {', '.join(missing)}. Nothing was loaded.")
            left -= set(keys.values())
            if isinstance(module, CheckedState):
                found = {
                    key.removeprefix(start): value
                    for key, value in state_dict.items()
                    if key.startswith(start)
                }
                try:
                    module.check_state(found)
                except ValueError as error:
                    raise RuntimeError(f"{call}: {start}{error} Nothing was loaded.") from error
        unexpected = sorted(key for key in left if key.startswith(prefix))
        if unexpected and strict:
            raise RuntimeError(f"{call}: unexpected: {', '.join(unexpected)}. Nothing was loaded.")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)


class KeepsPrecision(CheckedState):
    """A module whose own float buffers follow `.to(device)` but are never narrowed.

    A model may run in bfloat16; a moving average may not, because steps of a thousandth vanish in
    its 8 bits. `.double()` still widens.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        wide = {k: v for k, v in self._buffers.items() if v is not None and v.is_floating_point()}
        super()._apply(fn, recurse)
        for name, before in wide.items():
            after = self._buffers[name]
            if after is not None and after.dtype.itemsize < before.dtype.itemsize:
                self._buffers[name] = before.to(after.device)
        return self
