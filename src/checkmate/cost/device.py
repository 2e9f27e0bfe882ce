"""Device profiles: memory and speed of devices, by name or from a file, with the source of every figure; roofline estimates."""

from __future__ import annotations

import difflib
import functools
import os
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from checkmate.core.errors import FileFormatError, OptionError
from checkmate.core.files import schema_of
from checkmate.core.plan import HostMemory
from checkmate.core.units import MOST_BYTES, parse_bytes

FORMAT = "checkmate.device/1"

Positive = Annotated[int, msgspec.Meta(gt=0, le=MOST_BYTES)]
Amount = Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES)]


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties of a device that planning depends on.

    Attributes:
        name: Name by which `load_device` finds it.
        about: The exact model, in words.
        kind: PyTorch's device type; ROCm's devices are ``"cuda"`` there too.
        compute_capability: Major and minor version of a CUDA device; None for others.
        memory_bytes: Memory that a process can see, in total.
        context_bytes: Part of it that the runtime takes before the first tensor.
        blas_workspace_bytes: Workspace that the matrix library allocates at the first product and keeps.
        granule_bytes: Alignment: the allocator rounds requests up to a multiple of it.
        peak_flop_per_s: Floating-point operations per second, dense, by type; ``"tf32"`` is float32 on tensor cores.
        bytes_per_s: Memory traffic per second.
        launch_ns: Least time from the start of one op to the start of the next.
        pcie_bytes_per_s: Traffic to the host per second, one way, as the bus is specified.
        host_out_bytes_per_s: The same as copies from the device to pinned memory of the host reach it.
        host_in_bytes_per_s: The same for copies from the host.
        measured: Op with its arguments, as text -> nanoseconds and bytes of workspace that were measured on the device.
        sources: Field -> where its figure is published.
        assumed: Field -> why its figure is what it is, where none is published.
    """

    name: Annotated[str, msgspec.Meta(min_length=1)]
    about: str
    kind: Literal["cuda", "cpu"]
    compute_capability: tuple[Amount, Amount] | None = None
    memory_bytes: Positive
    context_bytes: Amount = 0
    blas_workspace_bytes: Amount = 0
    granule_bytes: Positive = 1
    peak_flop_per_s: dict[str, Positive]
    bytes_per_s: Positive
    launch_ns: Amount = 0
    pcie_bytes_per_s: Positive | None = None
    host_out_bytes_per_s: Positive | None = None
    host_in_bytes_per_s: Positive | None = None
    measured: dict[str, tuple[Amount, Amount]] = {}
    sources: dict[str, str] = {}
    assumed: dict[str, str] = {}

    def __post_init__(self) -> None:
        if "float32" not in self.peak_flop_per_s:
            raise ValueError("`peak_flop_per_s` has no `float32`, which stands for every type that is not listed")
        if self.context_bytes >= self.memory_bytes:
            raise ValueError("`context_bytes` leaves nothing of `memory_bytes`")

    def flop_per_s(self, dtype: str) -> int:
        """Peak for a type; for an unlisted type the peak for float32."""
        return self.peak_flop_per_s.get(dtype, self.peak_flop_per_s["float32"])

    def host_memory(self, amount: int | float | str) -> HostMemory:
        """The host for `Problem`: an amount of its memory, and the device's bus.

        Rates without a measurement are taken as 80 % of the specified rate: an H100 is measured at 53 of 64 GB/s.

        Args:
            amount: The most bytes of copies: ``"32GiB"``, for example.

        Raises:
            OptionError: The profile has no bus.

        Examples:
            >>> load_device("RTX 4090").host_memory("32GiB").out_bytes_per_s
            25600000000
        """
        specified = None if self.pcie_bytes_per_s is None else round(0.8 * self.pcie_bytes_per_s)
        out, back = self.host_out_bytes_per_s or specified, self.host_in_bytes_per_s or specified
        if out is None or back is None:
            raise OptionError(
                f"the profile of {self.name!r} has no bus to a host",
                hint="add pcie_bytes_per_s, or host_out_bytes_per_s and host_in_bytes_per_s, to the profile",
            )
        return HostMemory(parse_bytes(amount), out, back)


def device_names() -> tuple[str, ...]:
    """Names of the devices that ship with the package.

    Examples:
        >>> "H100" in device_names()
        True
    """
    return tuple(device.name for device in _shipped())


def load_device(name: str | os.PathLike[str] | Device) -> Device:
    """A device profile by the device's name, or from a file.

    Args:
        name: A name like ``"H100"`` or ``"RTX 4090"``, with any spacing and capitals; or the path of a profile, a file
            that ends in ``.json``.

    Raises:
        OptionError: No device of that name is known, or the file cannot be opened.
        FileFormatError: The file is not a device profile.

    Examples:
        >>> load_device("rtx-4090").name, load_device("H100").peak_flop_per_s["bfloat16"] / 1e12
        ('RTX 4090', 989.4)
    """
    if isinstance(name, Device):
        return name
    text = os.fspath(name)
    if text.endswith(".json"):
        try:
            return _decoded(Path(text).read_bytes(), text)
        except OSError as error:
            hint = "give a device's name, or the path of a profile"
            raise OptionError(f"{text}: {error.strerror or error}", hint=hint) from error
    known = {_plain(device.name): device for device in _shipped()}
    found = known.get(_plain(text))
    if found is None:
        near = difflib.get_close_matches(_plain(text), known, n=1, cutoff=0.0)
        nearest = known[near[0]].name if near else device_names()[0]
        raise OptionError(
            f"no device {text!r} is known; the nearest known one is {nearest!r}",
            hint=f"choose one of {', '.join(device_names())}, or give the path of a device profile, a .json file",
        )
    return found


def roofline_ns(device: Device, *, flop: int, dtype: str, moved_bytes: int) -> int:
    """Least nanoseconds of an op: its launch, then its arithmetic or its memory traffic, whichever takes longer.

    The roofline model of Williams, Waterman and Patterson (2009), plus the launch. No kernel is faster; many are slower
    by a factor of two. Plans depend on which of two ops is more expensive, and the model predicts that well.

    Examples:
        >>> roofline_ns(load_device("H100"), flop=2 * 4096**3, dtype="bfloat16", moved_bytes=3 * 2 * 4096**2)
        142911
    """
    compute_ns = flop * 1e9 / device.flop_per_s(dtype)
    traffic_ns = moved_bytes * 1e9 / device.bytes_per_s
    return round(device.launch_ns + max(compute_ns, traffic_ns))


def device_schema() -> dict[str, Any]:
    """JSON Schema of a device profile."""
    return schema_of(FORMAT, Device)


@functools.cache
def _shipped() -> tuple[Device, ...]:
    folder = files("checkmate.cost") / "devices"
    found = [_decoded(entry.read_bytes(), entry.name) for entry in folder.iterdir() if entry.name.endswith(".json")]
    return tuple(sorted(found, key=lambda device: (device.kind == "cpu", device.name.casefold())))


def _decoded(data: bytes, where: str) -> Device:
    try:
        body = msgspec.json.decode(data, type=dict[str, Any])
        if body.pop("format", None) != FORMAT:
            raise FileFormatError(f"{where}: not a device profile: `format` is not {FORMAT!r}", hint=_HINT)
        return msgspec.convert(body, type=Device)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"{where}: not a device profile: {error}", hint=_HINT) from None


_HINT = "start from the profile that `checkmate devices H100 --json` prints; docs/schemas/device.1.json describes all fields"


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())
