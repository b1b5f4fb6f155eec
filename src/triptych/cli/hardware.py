"""Options of the commands that simulate clusters: which model, where costs come from, and what is beside the devices."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from triptych.cli.simulate.deployment import Hardware

WHERE = "Deployment"
"""The panel of these options."""
DEVICE, DEGREE = "a100-80", "1"
"""Of each instance, where a command says nothing else."""

ModelName = Annotated[
    str,
    typer.Option(help="Model directory (weights are not needed), `config.json`, or *demo*.", rich_help_panel=WHERE),
]


def simulated_hardware(
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(help="Of the computation; by default the model's.", rich_help_panel=WHERE),
    ] = None,
    catalogue: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Devices beside those that are shipped.", rich_help_panel=WHERE),
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option(exists=True, help="Measured profiles, used in place of computed costs.", rich_help_panel=WHERE),
    ] = None,
    prepare_cores: Annotated[
        int,
        typer.Option(
            min=1,
            max=1024,
            help="Cores that preprocess, of each instance that encodes; for *triptych plan* the most.",
            rich_help_panel=WHERE,
        ),
    ] = 8,
    control_ms: Annotated[
        float,
        typer.Option(min=0, max=1000, help="Time of a message between two processes.", rich_help_panel=WHERE),
    ] = 0.3,
    devices_per_host: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="Place instances on hosts of so many devices: transfers within a host go by shared memory.",
            show_default="each instance on its own",
            rich_help_panel=WHERE,
        ),
    ] = None,
    host_network: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1e6,
            metavar="GB/S",
            help="What the instances of a host share for transfers with others, in each direction.",
            show_default="not shared",
            rich_help_panel=WHERE,
        ),
    ] = None,
) -> "Hardware":
    """The hardware that these options describe, with the usual device."""
    from triptych.cli.simulate.deployment import Hardware

    return Hardware(
        DEVICE,
        DEGREE,
        dtype,
        catalogue,
        profiles,
        prepare_cores,
        control_ms / 1000,
        devices_per_host=devices_per_host,
        host_network_nbytes_per_s=None if host_network is None else 1e9 * host_network,
    )
