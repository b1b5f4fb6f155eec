import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych import errors
from triptych.wire.status import error_from_status, error_to_status


@pytest.mark.parametrize("cls", errors.tree().values())
def test_an_error_of_the_tree_survives_a_round_trip(cls: type[errors.TriptychError]) -> None:
    error = cls("3 images, at most 2", param="messages[0]", retry_after_s=1.5)
    status = error_to_status(error)
    back = error_from_status(status.grpc_code, status.message, status.metadata)
    assert type(back) is cls
    assert (back.message, back.param, back.retry_after_s) == (error.message, error.param, error.retry_after_s)


def test_a_failed_transfer_keeps_its_items() -> None:
    status = error_to_status(errors.TransferFailed("gone", items=(0, 3)))
    back = error_from_status(status.grpc_code, status.message, status.metadata)
    assert isinstance(back, errors.TransferFailed)
    assert back.items == (0, 3)


@pytest.mark.parametrize(
    ("grpc_code", "cls"),
    [
        ("UNAVAILABLE", errors.InstanceLost),
        ("DEADLINE_EXCEEDED", errors.DeadlineExceeded),
        ("RESOURCE_EXHAUSTED", errors.Overloaded),
        ("UNIMPLEMENTED", errors.InternalError),
        ("INVALID_ARGUMENT", errors.InvalidRequest),
        ("CANCELLED", errors.Cancelled),
    ],
)
def test_a_grpc_status_becomes_the_nearest_error_without_addresses(
    grpc_code: str, cls: type[errors.TriptychError]
) -> None:
    error = error_from_status(grpc_code, "failed to connect to ipv4:127.0.0.1:1234", ())
    assert type(error) is cls
    assert "127.0.0.1" not in error.message


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            ("last error: UNKNOWN: ipv4:127.0.0.1:1: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:"
            "SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate: OK"),
            "the TLS handshake failed: unable to get local issuer certificate",
        ),
        (
            "UNKNOWN: ipv4:127.0.0.1:1: Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER",
            "the TLS handshake failed: wrong version number",
        ),
        ("ipv4:127.0.0.1:1: Custom verification check failed with error: UNAUTHENTICATED: Hostname Verification Check failed.", "another name"),
        ("failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed", "refuse the certificate"),
        ("Socket closed", "the connection to the instance was lost"),
    ],
)  # fmt: skip
def test_a_refused_certificate_is_told(message: str, told: str) -> None:
    error = error_from_status("UNAVAILABLE", message, ())
    assert told in error.message
    assert "127.0.0.1" not in error.message


@pytest.mark.parametrize(
    ("grpc_code", "message"),
    [
        ("INTERNAL", "Internal error from Core"),
        ("INTERNAL", "Received RST_STREAM with error code 2"),
        ("UNKNOWN", "Stream removed"),
    ],
)
def test_a_stream_that_breaks_is_a_lost_instance_whatever_grpc_was_doing(grpc_code: str, message: str) -> None:
    assert type(error_from_status(grpc_code, message, ())) is errors.InstanceLost
    assert type(error_from_status(grpc_code, "internal error", ())) is errors.InternalError


def test_a_message_above_the_grpc_size_limit_is_too_large() -> None:
    too_large = error_from_status("RESOURCE_EXHAUSTED", "SERVER: Received message larger than max (9 vs. 4)", ())
    assert type(too_large) is errors.RequestTooLarge


def test_overload_errors_have_retry_after() -> None:
    assert errors.Overloaded("full").retry_after_s == 1.0
    assert errors.ArenaFull("full").retry_after_s == 1.0
    assert errors.Overloaded("full", retry_after_s=3.0).retry_after_s == 3.0
    assert errors.Unavailable("down").retry_after_s is None


@given(st.lists(st.tuples(st.sampled_from(["triptych-code", "triptych-items", "triptych-retry-after-s"]), st.text())))
def test_no_metadata_breaks_the_translation(metadata: list[tuple[str, str]]) -> None:
    assert isinstance(error_from_status("INTERNAL", "", metadata), errors.TriptychError)
