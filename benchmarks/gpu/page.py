"""Print the results of `run.py` as Markdown; what was not measured says so.

python benchmarks/gpu/page.py [FOLDER]
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from run import CLOCK, KINDS, MODELS, PARTS, fastest_within, read, verdict

PREDICTED = HERE / "predicted.json"
NOT_MEASURED = "not measured"
TITLES = {
    "peaks": "Planned and measured peaks",
    "expandable": "The same with expandable segments",
    "fits": "Predictions of `fits` against the device",
    "front": "Peak against time, beside other ways to spend less memory",
    "inductor": "The same with Inductor",
    "reserved": "Budgets of reserved memory",
    "offload": "Copies to the host",
}
ABOUT = {
    "peaks": "Everything that is allocated, in GiB. *Identical* compares loss, gradients, buffers and random states with\n"
    "keeping everything, byte by byte, with deterministic kernels. *Costs* is the sum of the costs of all ops over the\n"
    "measured step.",
    "expandable": "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.",
    "fits": "The prediction is made from shapes alone, with the profile of the device.",
    "front": "Fastest of five steps, by CUDA events. *Beaten* says whether another way is faster than the fastest plan at its\n"
    "peak, or takes less memory than every plan.",
    "inductor": "As above; plans and others are compiled by Inductor.",
    "reserved": '`budget_of="reserved"`: what the allocator holds, with the arena that the plan predicts.',
    "offload": "Whole steps with SGD, at one budget without and with 64 GiB of the host. The last row copies what a bus of a\n"
    "thousand times the rate could hide: whether copies are right does not depend on whether they pay. *Time* is the measured\n"
    "time over that of keeping everything, *planned time* the planned one over the measured one.",
}


def main() -> int:
    """Print the page."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results"
    print(page({part: known for part in PARTS if (known := read(folder, part)) is not None}))
    return 0


def page(results: Mapping[str, dict[str, Any]]) -> str:
    """The page of results by part."""
    done = {part: known for part, known in results.items() if "failed" not in known}
    lines = [
        "# Measurements on a GPU",
        "",
        "From the results of `python benchmarks/gpu/run.py`. What they mean: `docs/explanation/what-a-gpu-adds.md`.",
        "",
        f"{len(done)} of {len(PARTS)} parts were measured{'' if done else ': no GPU has been at hand'}.",
        "",
        *_machines(done),
        *_doctor(results.get("doctor")),
    ]
    for kind in KINDS:
        lines += [f"## {TITLES[kind]}", "", ABOUT[kind], ""]
        if not any(f"{kind}:{model}" in results for model in MODELS):
            lines += [f"{NOT_MEASURED.capitalize()}.", ""]
            continue
        header, rows = _TABLES[kind]
        body = [row for model in MODELS for row in _rows(rows, model, results.get(f"{kind}:{model}"), len(header))]
        lines += [_line(["model", *header]), _line(["---"] * (len(header) + 1)), *map(_line, body), ""]
        remarks = dict.fromkeys(r for model in MODELS for r in results.get(f"{kind}:{model}", {}).get("remarks", ()))
        lines += [text for remark in remarks for text in (remark, "")]
    lines += ["## CUDA graphs", "", *_graphs(results.get("graphs:gpt2")), ""]
    broken = [f"- {part}: {line}" for part, known in results.items() for line in verdict(known)]
    lines += _predicted()
    lines += ["## Broken promises", "", *(broken or ["None." if done else f"{NOT_MEASURED.capitalize()}."]), ""]
    return "\n".join(lines)


def _machines(done: Mapping[str, dict[str, Any]]) -> list[str]:
    found: dict[str, None] = {}
    for known in done.values():
        gpu, tools = known["hardware"].get("gpu", {}), known["versions"]
        name = gpu.get("name", known["hardware"]["processor"])
        size = " at tiny size" if known["tiny"] else ""
        found[f"- {name}{size}, CUDA {gpu.get('cuda')}; Python {tools['python']}, PyTorch {tools['torch']}."] = None
    return [*found, ""] if found else []


def _doctor(known: dict[str, Any] | None) -> list[str]:
    lines = ["## `checkmate doctor`", ""]
    if known is None or "failed" in known:
        return [*lines, f"{NOT_MEASURED.capitalize()}{'' if known is None else ': ' + known['failed']}.", ""]
    rows = [_line([c["name"], c["verdict"], c["detail"]]) for c in known["result"]["checks"]]
    return [*lines, _line(["check", "verdict", "found"]), _line(["---"] * 3), *rows, ""]


def _rows(make: Any, model: str, known: dict[str, Any] | None, columns: int) -> list[Sequence[str]]:
    if known is None or "failed" in known or not known["result"]:
        reason = "" if known is None else f": {known.get('failed') or '; '.join(known['left_out'])}"
        return [[model, f"{NOT_MEASURED}{reason}".replace("|", "/").replace("\n", " "), *[""] * (columns - 1)]]
    return [[model, *row] for row in make({**known["result"], "left_out": known["left_out"]})]


def _peaks(result: dict[str, Any]) -> list[list[str]]:
    return [
        [
            row["budget"],
            _gib(row["budget_bytes"]),
            _gib(row["planned_bytes"]),
            _gib(row["allocated_bytes"]),
            f"{100 * (row['allocated_bytes'] / row['planned_bytes'] - 1):+.2f} %",
            _gib(row["predicted_reserved_bytes"]),
            _gib(row.get("reserved_bytes")),
            {True: "yes", False: "NO", None: "-"}[row.get("identical")],
            f"{row['overhead']:.3f}",
            f"{row['bound_overhead']:.3f}",
            f"{row['time_ratio']:.3f}" if "time_ratio" in row else "-",
            f"{row['ops_s'] / row['time_s']:.2f}",
        ]
        for row in result["points"]
    ]


def _fits(result: dict[str, Any]) -> list[list[str]]:
    predicted, measured = result["predicted_keep_all_bytes"], result["allocated_bytes"]
    return [
        [
            result["profile"],
            _gib(predicted),
            _gib(measured),
            f"{100 * (predicted / measured - 1):+.2f} %",
            f"{result['predicted_least_s']:.4f}" if result["predicted_least_s"] else "-",
            f"{result['time_s']:.4f}",
        ]
    ]


def _front(result: dict[str, Any]) -> list[list[str]]:
    def beats(other: dict[str, Any]) -> str:
        if other.get("ours"):
            return ""
        best = fastest_within(other["allocated_bytes"], result["variants"], result["left_out"])
        if best is None:
            return NOT_MEASURED
        return "NO PLAN AS SMALL" if best == math.inf else "yes" if best > CLOCK * other["time_s"] else "no"

    return [[v["name"], _gib(v["allocated_bytes"]), f"{v['time_s']:.4f}", beats(v)] for v in result["variants"]]


def _reserved(result: dict[str, Any]) -> list[list[str]]:
    return [
        [row["budget"], _gib(row["budget_bytes"]), _gib(row["predicted_reserved_bytes"]), _gib(row.get("reserved_bytes"))]
        for row in result["points"]
    ]


def _offload(result: dict[str, Any]) -> list[list[str]]:
    rates = f"{result['out_bytes_per_s'] / 1e9:.1f} / {result['in_bytes_per_s'] / 1e9:.1f}"
    return [
        [
            row["name"],
            _gib(row.get("budget_bytes")),
            _gib(row["planned_bytes"]),
            _gib(row["allocated_bytes"]),
            str(row.get("copies", "-")),
            _gib(row.get("planned_host_bytes")),
            _gib(row.get("host_bytes")),
            {True: "yes", False: "NO", None: "-"}[row.get("identical")],
            f"{row['time_ratio']:.3f}" if "time_ratio" in row else "-",
            f"{row['planned_s'] / row['time_s']:.2f}" if "planned_s" in row else "-",
            rates,
        ]
        for row in result["points"]
    ]


def _predicted() -> list[str]:
    """What `predicted.py` left, which needs no GPU."""
    lines = ["## Reserved memory by the model of the allocator", ""]
    if not PREDICTED.exists():
        return [*lines, "Not predicted yet.", ""]
    report = json.loads(PREDICTED.read_text())
    lines += [
        f"No GPU was used: the models are traced from shapes for an {report['device']}, and their plans are replayed on the",
        "model of PyTorch's allocator (`benchmarks/gpu/predicted.py`). In GiB: the peak of the live bytes of a plan; the blocks",
        "in use, which `max_memory_allocated` counts; what is reserved with a segment for each large request; and with one",
        "arena made before the first step.",
        "",
        _line(["model", "budget", "live bytes", "blocks", "reserved", "above", "with an arena", "above", "overhead"]),
        _line(["---"] * 9),
    ]
    for model, rows in report["models"].items():
        for row in rows:
            live, reserved, arena = (row[n] for n in ("planned_bytes", "reserved_bytes", "reserved_with_arena_bytes"))
            cells = [model, row["budget"], _gib(live), _gib(row["allocated_bytes"]), _gib(reserved), _above(reserved, live)]
            lines.append(_line([*cells, _gib(arena), _above(arena, live), f"{row['overhead']:.3f}"]))
    return [*lines, ""]


def _above(size_bytes: int, live_bytes: int) -> str:
    return f"{100 * (size_bytes / live_bytes - 1):.1f} %"


def _graphs(known: dict[str, Any] | None) -> list[str]:
    if known is None or "failed" in known:
        return [f"{NOT_MEASURED.capitalize()}{'' if known is None else ': ' + known['failed']}."]
    rows = [_line([v["name"], _gib(v["allocated_bytes"]), f"{v['time_s']:.4f}"]) for v in known["result"]["variants"]]
    head = [_line(["variant", "peak", "seconds"]), _line(["---"] * 3)]
    return [f"Under a budget: {known['result']['under_a_budget']}.", "", *head, *rows]


_PEAKS_HEADER = ["budget", "GiB", "planned", "measured", "difference", "reserved, predicted", "reserved", "identical", "overhead"]
_PEAKS_HEADER += ["proven at least", "time", "costs"]
_FRONT_HEADER = ["variant", "peak", "seconds", "beaten"]
_OFFLOAD_HEADER = [
    "variant",
    "budget",
    "planned",
    "measured",
    "copies",
    "host, planned",
    "host",
    "identical",
    "time",
    "planned time",
    "GB/s out / in",
]
_TABLES: dict[str, tuple[list[str], Any]] = {
    "peaks": (_PEAKS_HEADER, _peaks),
    "expandable": (_PEAKS_HEADER, _peaks),
    "fits": (["profile", "predicted", "measured", "difference", "seconds at least", "seconds"], _fits),
    "front": (_FRONT_HEADER, _front),
    "inductor": (_FRONT_HEADER, _front),
    "reserved": (["share", "budget", "predicted", "reserved"], _reserved),
    "offload": (_OFFLOAD_HEADER, _offload),
}


def _gib(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**30:.3f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
