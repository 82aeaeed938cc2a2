"""Names of devices in tables."""

import re

from brigata.describe.device import device_names
from brigata.validate.tables import RefusedRowError

SHORT = {
    "a100": "a100-sxm4-80gb",
    "h100": "h100-sxm5-80gb",
    "h200": "h200-sxm-141gb",
    "b200": "b200-sxm-180gb",
    "b300": "b300-sxm-288gb",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "v100": "v100-sxm2-32gb",
    "h800": "h800-sxm5-80gb",
    "a800": "a800-sxm4-80gb",
    "mi300x": "mi300x-192gb",
    "mi325x": "mi325x-256gb",
    "mi355x": "mi355x-288gb",
    "gh200": "gh200-sxm-96-144gb",
    "h20": "h20-sxm-96gb",
    "l40s": "l40s-48gb",
}
"""Short names -> presets."""


def device_of(name: str) -> str:
    """The preset of a device's name.

    Raises:
        RefusedRowError: none is described.
    """
    plain = name.replace("(per GPU)", "").replace("(Trillium)", "").strip().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    for candidate in (slug, SHORT.get(slug, ""), SHORT.get(slug.split("-")[0], "")):
        if candidate in device_names():
            return candidate
    raise RefusedRowError(f"device {name!r} is not described")
