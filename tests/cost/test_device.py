"""Device profiles are complete, sourced, and found by any spelling."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

import checkmate
from checkmate.core.errors import FileFormatError, OptionError
from checkmate.cost import Device, device_names, device_schema, load_device, roofline_ns

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
WANTED = (
    *("A100", "A100 40 GB", "H100", "H100 NVL", "H200", "B200", "GH200", "GB200", "V100", "MI300X"),
    *("L4", "L40S", "T4", "A10G", "A6000", "RTX 3090", "RTX 4060", "RTX 4070", "RTX 4080", "RTX 4090", "RTX 5090", "CPU"),
)
NOT_FIGURES = ("name", "about", "kind", "compute_capability", "measured", "sources", "assumed")


def profile(**changes: object) -> dict[str, object]:
    body = {"format": "checkmate.device/1", **msgspec.to_builtins(load_device("T4")), **changes}
    return {key: value for key, value in body.items() if value is not ...}


@pytest.mark.parametrize("name", WANTED)
def test_every_figure_says_where_it_is_from(name: str) -> None:
    """A figure without a source, or a reason, could be anybody's guess."""
    device = load_device(name)
    figures = {f for f in Device.__struct_fields__ if f not in NOT_FIGURES}
    given = {f for f in figures if getattr(device, f) not in (0, None)}
    assert given <= device.sources.keys() | device.assumed.keys()
    assert not device.sources.keys() & device.assumed.keys()
    assert all("https://" in source for source in device.sources.values())


@pytest.mark.parametrize("name", WANTED)
def test_figures_are_of_a_device(name: str) -> None:
    """Lower precision is no slower, and what is published in other units has been converted."""
    device = load_device(name)
    peaks = device.peak_flop_per_s
    assert peaks["float32"] <= device.flop_per_s("tf32") <= device.flop_per_s("float16") or "float16" not in peaks
    assert device.flop_per_s("float8_e4m3fn") == peaks["float32"]
    assert device.context_bytes < device.memory_bytes / 10
    if device.kind == "cuda":
        assert 2**32 < device.memory_bytes < 2**38
        assert 1e11 < device.bytes_per_s < 1e13
        assert 1e12 < peaks["float32"] < 1e15
        assert device.granule_bytes == 512


@pytest.mark.parametrize("spelling", ["RTX 4090", "rtx4090", "Rtx-4090", "RTX_4090"])
def test_names_are_found_however_they_are_spelt(spelling: str) -> None:
    """Nobody remembers where the blank is."""
    assert load_device(spelling) is load_device("RTX 4090")


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    """A typing error must not become another device."""
    with pytest.raises(OptionError, match="'H1OO' is known; the nearest known one is 'H100'") as error:
        load_device("H1OO")
    assert all(name in error.value.hint for name in device_names())


def test_a_profile_of_ones_own_is_read_from_its_file(tmp_path: Path) -> None:
    """What is written is what is read, by path."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile(name="Mine", memory_bytes=10**9)))
    mine = load_device(path)
    assert (mine.name, mine.memory_bytes) == ("Mine", 10**9)
    assert load_device(str(path)) == mine == load_device(mine)


BROKEN = {
    "not JSON": "{",
    "another format": json.dumps(profile(format="checkmate.graph/1")),
    "no format": json.dumps(profile(format=...)),
    "no memory": json.dumps(profile(memory_bytes=...)),
    "negative": json.dumps(profile(bytes_per_s=-1)),
    "a word for a number": json.dumps(profile(launch_ns="fast")),
    "an unknown field": json.dumps(profile(colour="green")),
    "no float32": json.dumps(profile(peak_flop_per_s={"float16": 1})),
    "all context": json.dumps(profile(context_bytes=2**40)),
    "a list": "[]",
    "not text": "\udcff",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_profile_is_refused_in_words(tmp_path: Path, what: str) -> None:
    """The file is named, and where to look for what it should be."""
    path = tmp_path / "broken.json"
    path.write_bytes(BROKEN[what].encode("utf-8", "surrogateescape"))
    with pytest.raises(FileFormatError, match=r"broken\.json: not a device profile") as error:
        load_device(path)
    assert "device.1.json" in error.value.hint


def test_a_missing_file_is_an_option_error(tmp_path: Path) -> None:
    """As any path that cannot be opened."""
    with pytest.raises(OptionError, match=r"none\.json: No such file"):
        load_device(tmp_path / "none.json")


def test_the_published_schema_is_that_of_the_code(request: pytest.FixtureRequest) -> None:
    """Whoever writes profiles validates them with this file; `--regen` writes it anew."""
    path = SCHEMAS / "device.1.json"
    text = json.dumps(device_schema(), indent=1) + "\n"
    if request.config.getoption("--regen"):
        path.write_text(text)
    assert path.read_text() == text


def test_an_op_takes_its_launch_and_the_longer_of_arithmetic_and_traffic() -> None:
    """That is what a roofline is."""
    device = load_device("H100")
    nothing = roofline_ns(device, flop=0, dtype="float32", moved_bytes=0)
    assert nothing == device.launch_ns
    second = roofline_ns(device, flop=device.flop_per_s("bfloat16"), dtype="bfloat16", moved_bytes=0)
    assert second == roofline_ns(device, flop=0, dtype="bfloat16", moved_bytes=device.bytes_per_s) == 10**9 + nothing


def test_devices_are_public() -> None:
    """Planning for a device begins with its profile."""
    assert checkmate.load_device("H100").name == "H100"


@pytest.mark.parametrize("name", ["memory_bytes", "bytes_per_s", "launch_ns", "peak_flop_per_s", "pcie_bytes_per_s"])
def test_figures_of_a_profile_are_amounts(name, tmp_path):
    """A figure of a hundred digits ended with an internal error where it was printed."""
    profile = msgspec.structs.asdict(load_device("H100"))
    profile[name] = {"float32": 10**400} if name == "peak_flop_per_s" else 10**400
    (tmp_path / "device.json").write_text(json.dumps({"format": "checkmate.device/1", **profile}))
    with pytest.raises(FileFormatError, match="Expected `int` <="):
        load_device(tmp_path / "device.json")
