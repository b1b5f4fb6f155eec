"""Tiers of hardware, as people write them."""

import pytest

from triptych.domain.tier import Tier


@pytest.mark.parametrize(
    ("text", "tier"),
    [
        ("l4", Tier("l4")),
        ("a100-80:device=NVIDIA A100 80GB,price=3.67", Tier("a100-80", "NVIDIA A100 80GB", 3.67)),
        ("slow:price=0,speed=0.25", Tier("slow", usd_per_hour=0.0, speed=0.25)),
        ("x.1:device=a=b", Tier("x.1", "a=b")),
    ],
)
def test_a_tier_is_written_and_read(text: str, tier: Tier) -> None:
    assert Tier.parse(text) == tier
    assert str(tier) == text


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is no name of a tier"),
        ("L4", "is no name of a tier"),
        ("a/b", "is no name of a tier"),
        ("x" * 25, "is no name of a tier"),
        ("l4:cost=1", "is not one of device=TEXT, price=NUMBER, speed=NUMBER"),
        ("l4:price=1,price=2", "each once"),
        ("l4:price=cheap", "the price of tier l4 is 'cheap', which is no number"),
        ("l4:price=nan", "which is no number"),
        ("l4:price=-1", "the price of tier l4 is -1, must be from 0 to 1e"),
        ("l4:speed=0", "the speed of tier l4 is 0, must be from 0.001 to 1000"),
        ("l4:device=" + "x" * 65, "has up to 64 printable characters"),
    ],
)
def test_what_is_wrong_with_a_tier_is_said(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Tier.parse(text)
