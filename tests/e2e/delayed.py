"""Instances whose engines sleep: for tests of processes, in which what they compute does not matter. They load no torch."""

from pathlib import Path

from triptych.engine.delay import synthetic_decoder_profile, synthetic_encoder_profile
from triptych.runtime.profiles import write_profile

LOAD_S = 0.1


def delayed(
    folder: Path,
    *,
    pass_s: float = 0.02,
    token_s: float = 0.0001,
    step_s: float = 0.01,
    sequence_s: float = 0.001,
    prefill_token_s: float = 0.0001,
) -> dict[str, tuple[str, ...]]:
    """Options of a cluster, by service. The profiles of the costs, in seconds, are written to ``folder``."""
    profiles = folder / "profiles"
    encoder = synthetic_encoder_profile(pass_s=pass_s, token_s=token_s, load_s=LOAD_S)
    decoder = synthetic_decoder_profile(
        step_s=step_s, sequence_s=sequence_s, prefill_token_s=prefill_token_s, load_s=LOAD_S
    )
    for name, profile in (("encoder", encoder), ("decoder", decoder)):
        write_profile(profiles / f"{name}.json", profile)
    return dict.fromkeys(("encoder", "text"), ("--delay-profile", str(profiles)))
