"""What devices there are."""

from functools import cached_property
from pathlib import Path

from pydantic import Field, field_validator

from brigata.describe.device import DeviceSpec, device_names, load_device, read_device
from brigata.describe.errors import one_of
from brigata.describe.section import Section
from brigata.describe.software import SoftwareSpec, load_software, software_names


class ClusterSpec(Section):
    """The machine or machines that a job runs on."""

    preset: str = "local"
    """``local`` is this machine; or, for planning, a described device (``brigata devices``)."""
    file: str | None = None
    """TOML file that describes the device instead of a preset, as ``brigata calibrate`` writes it."""
    devices: int | None = Field(default=None, gt=0)
    """Number of ranks. Omitted: as many as the layout needs."""
    node_devices: int | None = Field(default=None, gt=0)
    """Devices of a node. Default: the device's usual."""
    network_gbs: float | None = Field(default=None, gt=0)
    """Network between nodes (GB/s a device, one direction). Default: the device's usual."""
    oversubscription: float = Field(default=1.0, ge=1)
    """By how much the network's upper levels are narrower than what the nodes can send."""
    software: str = "brigata"
    """Generation of the training software (``brigata devices``)."""

    @field_validator("preset")
    @classmethod
    def _known_device(cls, name: str) -> str:
        if name != "local" and name not in device_names():
            raise ValueError(f"cluster.preset = {name!r} is not known; use local, {one_of(device_names())}")
        return name

    @field_validator("file")
    @classmethod
    def _readable(cls, name: str | None) -> str | None:
        if name is not None:
            read_device(Path(name))
        return name

    @field_validator("software")
    @classmethod
    def _known_software(cls, name: str) -> str:
        if name not in software_names():
            raise ValueError(f"cluster.software = {name!r} is not known; use {one_of(software_names())}")
        return name

    @cached_property
    def device(self) -> DeviceSpec:
        """The device; ``local`` without a file is described as ``cpu``."""
        if self.file is not None:
            return read_device(Path(self.file))
        return load_device("cpu" if self.preset == "local" else self.preset)

    @cached_property
    def software_spec(self) -> SoftwareSpec:
        """The software."""
        return load_software(self.software)

    @property
    def domain(self) -> int:
        """Devices that fast links connect."""
        device = self.device
        if self.node_devices is None:
            return device.domain_devices
        return max(
            self.node_devices, device.domain_devices if device.domain_devices > device.node_devices else 0
        )

    @property
    def network(self) -> float:
        """Network between nodes (GB/s a device)."""
        return (self.network_gbs or self.device.network_gbs) / self.oversubscription
