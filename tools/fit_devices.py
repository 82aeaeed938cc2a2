"""Writes the device presets: published rates as they are, curves fitted to micro-measurements.

    python tools/fit_devices.py DATA            # fits, prints their quality, writes describe/devices/*.toml

``DATA`` holds ``hardware.csv`` and the ``micro_*.csv`` tables. Every fourth measurement is held out; errors
are printed for it and for the rest. Only the fitted parameters and the cited rates enter the repository.
"""

import argparse
import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Printed

from brigata.describe.device import DeviceSpec
from fit_curves import Fit, fit_attention, fit_collective, fit_grouped, fit_products, fit_scan

Row = dict[str, str]
TARGET = Path(__file__).resolve().parent.parent / "src/brigata/describe/devices"
ALIASES = {
    "GB200-NVL72 (per GPU)": ("GB200",),
    "B300-SXM-288GB": ("B300-SXM",),
    "GB300-NVL72 (per GPU)": ("GB300",),
    "H800-SXM5-80GB": ("H800",),
    "H20-SXM-96GB": ("H20",),
}
"""Names of a device in the micro tables, beside its own."""
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "fp4"}
OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
LIKE = {
    "a100-sxm4-40gb": "a100-sxm4-80gb",
    "a800-sxm4-80gb": "a100-sxm4-80gb",
    "h800-sxm5-80gb": "h100-sxm5-80gb",
    "gh200-sxm-96-144gb": "h200-sxm-141gb",
    "h20-sxm-96gb": "h100-sxm5-80gb",
    "h100-96gb-hbm2e-500w": "h100-sxm5-80gb",
    "gb200-nvl72": "b200-sxm-180gb",
    "gb300-nvl72": "gb200-nvl72",
    "b300-sxm-288gb": "b200-sxm-180gb",
}
"""Devices of the same generation, whose curves stand in for those that were not measured."""
TOPOLOGY = (("bus", ("PCIe",)), ("mesh", ("mesh (7", "full mesh", "mesh")), ("torus", ("torus", "3D mesh")))
FEED = {"TPU-v4": 4, "TPU-v5e": 1, "TPU-v5p": 2, "TPU-v6e (Trillium)": 1}
"""Matrix units a core, for devices that publish no number of processors."""


def name_of(device: str) -> str:
    """The preset's name: small letters, digits and hyphens."""
    short = device.replace("(per GPU)", "").replace("(Trillium)", "").strip()
    return re.sub(r"[^a-z0-9]+", "-", short.lower()).strip("-")


def read(path: Path) -> list[Row]:
    """Rows of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def number(row: Row, *columns: str) -> float | None:
    """The first of the columns that says something."""
    return next((float(row[c]) for c in columns if row[c]), None)


def published(row: Row) -> dict[str, Any]:
    """What a device's makers say; what they do not is left to a stated default."""
    peaks = {
        "fp32": number(row, "peak_fp32_tflops"),
        "tf32": number(row, "peak_tf32_tflops"),
        "bf16": number(row, "peak_bf16_tflops_dense"),
        "fp16": number(row, "peak_fp16_tflops_dense"),
        "fp8": number(row, "peak_fp8_tflops_dense"),
        "fp4": number(row, "peak_fp4_tflops_dense"),
    }
    notes = [row["notes"]] if row["notes"] else []

    def known(value: float | None, default: float, what: str) -> float:
        if value is None:
            notes.append(f"{what} not published: {default:g} assumed")
        return default if value is None else value

    if peaks["bf16"] is None and peaks["fp16"] is None:
        peaks["bf16"] = peaks["fp16"] = 2300.0
        notes.append("bf16 peak from the clock ratio to the MI355X")
    if peaks["fp32"] is None:
        peaks["fp32"] = (peaks["bf16"] or peaks["fp16"] or 0.0) / 16
    topology = next(
        (kind for kind, words in TOPOLOGY if any(w in row["intra_topology"] for w in words)), "switch"
    )
    memory = number(row, "hbm_bytes_usable")
    return {
        "vendor": row["vendor"],
        "peak_tflops": {key: value for key, value in peaks.items() if value is not None},
        "memory_gb": round(memory / 1e9, 3)
        if memory
        else round(known(number(row, "hbm_gb_nominal"), 32.0, "memory") * 2**30 / 1e9, 3),
        "memory_gbs": known(number(row, "hbm_bw_gbps"), 1600.0, "memory bandwidth"),
        "processors": int(number(row, "sm_or_cu") or FEED.get(row["device"], 16)),
        "power_w": number(row, "tdp_w"),
        "node_devices": int(number(row, "gpus_per_node") or 8),
        "domain_devices": int(number(row, "scaleup_domain") or 8),
        "link_gbs": known(number(row, "intra_bw_gbps_per_gpu_unidir"), 196.0, "link bandwidth"),
        "topology": topology,
        "multicast": "NVLS" in row["intra_topology"] or "NVL72" in row["intra_topology"],
        "network_gbs": known(number(row, "nic_bw_gbps_per_gpu_unidir"), 12.5, "network"),
        "host_gbs": known(number(row, "pcie_bw_gbps_unidir"), 32.0, "link to the host"),
        "source": row["sources"],
        "note": "; ".join(notes),
    }


def fit_device(
    spec: DeviceSpec, names: Sequence[str], tables: dict[str, list[Row]]
) -> tuple[dict[str, Any], list[Fit]]:
    """Curves of one device from what was measured on it."""
    curves: dict[str, Any] = {"product": {}, "grouped": {}, "collective": {}}
    fits: list[Fit] = []

    def rows(table: str, **wanted: str) -> list[Row]:
        return [r for r in tables[table] if r["gpu"] in names and all(r[k] == v for k, v in wanted.items())]

    def keep(place: dict[str, Any], key: str, found: Fit | None) -> None:
        if found is not None:
            place[key] = found.parameters
            fits.append(found)

    for dtype, precision in DTYPES.items():
        keep(curves["product"], precision, fit_products(spec, precision, rows("gemm", dtype=dtype)))
    for precision in ("fp8", "fp4"):  # measured with the launches of quantisation, which training fuses
        if precision in curves["product"]:
            curves["product"][precision]["launch_us"] = curves["product"]["bf16"]["launch_us"]
    keep(curves, "attention", fit_attention(spec, rows("attention")))
    for dtype, precision in {"bfloat16": "bf16", "fp8_block": "fp8", "nvfp4": "fp4"}.items():
        even = rows("moe", dtype=dtype, routing="balanced") or rows(
            "moe", dtype=dtype, routing="power_law_1.01"
        )
        even = [row for row in even if "min_latency" not in row["kernel"]]
        if dtype == "fp8_block" and "B200" not in names[0]:
            even = []  # block scales in software; training on Hopper scales whole tensors
        keep(curves["grouped"], precision, fit_grouped(spec, precision, even))
    keep(curves, "scan", fit_scan(spec, rows("mamba_linear_attention", kernel="mamba_chunk_scan_combined")))
    if "bf16" in curves["grouped"] and "fp8" in curves["product"] and "fp8" not in curves["grouped"]:
        bf16, share = (
            curves["grouped"]["bf16"],
            curves["product"]["fp8"]["rate"] / curves["product"]["bf16"]["rate"],
        )
        curves["grouped"]["fp8"] = {**bf16, "rate": round(bf16["rate"] * share, 4)}
    inside = [r for r in tables["collectives"] if r["gpu"] in names and r["source_key"] == "aiconfigurator"]
    for operation, ours in OPERATIONS.items():
        keep(
            curves["collective"],
            ours,
            fit_collective(spec, ours, [r for r in inside if r["op"] == operation]),
        )
    return {key: value for key, value in curves.items() if value}, fits


def toml(value: Any, path: tuple[str, ...] = ()) -> str:
    """A nested table in TOML."""
    plain = {k: v for k, v in value.items() if not isinstance(v, dict) and v is not None}
    lines = [f"[{'.'.join(path)}]"] if path and plain else []
    lines += [f"{key} = {text(item)}" for key, item in plain.items()]
    parts = ["\n".join(lines)] if lines else []
    parts += [toml(item, (*path, key)) for key, item in value.items() if isinstance(item, dict) and item]
    return "\n\n".join(part for part in parts if part)


def text(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', "'") + '"'
    return f"{value:.4g}" if isinstance(value, float) and value < 1000 else f"{value:g}"


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    options = parser.parse_args()
    tables = {
        kind: read(options.data / f"micro_{kind}.csv")
        for kind in ("gemm", "attention", "moe", "mamba_linear_attention", "collectives")
    }
    presets: dict[str, dict[str, Any]] = {}
    shown = Printed(
        "device", "curve", "rows", "median held out", "mean", "bias", "fitted on", title="Fit quality"
    )
    for row in read(options.data / "hardware.csv"):
        name, facts = name_of(row["device"]), published(row)
        spec = DeviceSpec.model_validate({k: v for k, v in facts.items() if v is not None})
        curves, fits = fit_device(spec, (row["device"], *ALIASES.get(row["device"], ())), tables)
        rows = sum(fit.rows for fit in fits)
        fitted = f"{rows} measurements of micro_gemm, attention, moe, mamba and collectives" if rows else ""
        presets[name] = {**facts, "fitted": fitted, "curves": curves}
        for fit in fits:
            shown.add_row(name, fit.name, str(fit.rows), *(f"{x:.1%}" for x in fit.held), f"{fit.kept:.1%}")
    for name, like in LIKE.items():
        inherit(presets, name, like)
    for name, preset in presets.items():
        carry_sustained(preset, TARGET / f"{name}.toml")
        DeviceSpec.model_validate({k: v for k, v in preset.items() if v is not None})
        (TARGET / f"{name}.toml").write_text(toml(preset) + "\n", encoding="utf-8")
    Console().print(shown)


def inherit(presets: dict[str, dict[str, Any]], name: str, like: str) -> None:
    """Curves that were not measured on ``name`` are those of ``like``."""
    own, other = presets[name]["curves"], presets[like]["curves"]
    for key, value in other.items():
        own[key] = (
            {**value, **own.get(key, {})}
            if key in ("product", "grouped", "collective")
            else own.get(key, value)
        )
    said = presets[name]["fitted"]
    presets[name]["fitted"] = f"{said}{'; ' if said else ''}what was not measured: as {like}"


def carry_sustained(preset: dict[str, Any], path: Path) -> None:
    """What training runs taught (``fit_software``) stays when the micro curves are fitted anew."""
    import tomllib

    if path.exists():
        old = tomllib.loads(path.read_text(encoding="utf-8")).get("curves", {})
        for key in ("sustained", "network_share", "network_us"):
            if key in old:
                preset["curves"] = {key: old[key], **preset["curves"]}


if __name__ == "__main__":
    main()
