from triptych.policy.transport import Endpoint, far_first, rank_backends, usual


def order(reader: list[Endpoint], holder: list[Endpoint], preferred: str | None = None) -> list[str]:
    return [ranked.backend for ranked in rank_backends(reader, holder, preferred)]


def ends(host: str, *, rdma: bool = False) -> list[Endpoint]:
    return [Endpoint(backend, host, rdma=rdma) for backend in ("tcp", "nixl", "memory")]


def test_backends_are_ordered_by_measured_speed() -> None:
    assert order(ends("a"), ends("a")) == ["memory", "nixl", "tcp"]
    assert order(ends("a"), ends("b")) == ["memory", "tcp"]  # a dying reader would take the holder with it
    assert order(ends("a"), ends("b"), preferred="nixl") == ["nixl", "memory", "tcp"]
    assert order(ends("a", rdma=True), ends("b")) == ["memory", "tcp"]
    assert order(ends("a", rdma=True), ends("b", rdma=True)) == ["memory", "nixl", "tcp"]
    assert order(ends("a"), ends("a"), preferred="tcp") == ["tcp", "memory", "nixl"]
    assert order(ends("a")[:1], ends("a")[1:]) == []
    assert order([*ends("a"), Endpoint("shm", "a")], [*ends("a"), Endpoint("shm", "a")])[:2] == ["memory", "shm"]


def test_shared_memory_is_not_tried_between_hosts() -> None:
    assert order([Endpoint("shm", "a")], [Endpoint("shm", "b")], preferred="shm") == []


def test_backends_missing_on_one_side_are_skipped() -> None:
    tcp, nixl, shm = (Endpoint(backend, "a") for backend in ("tcp", "nixl", "shm"))
    assert order([tcp], [nixl, tcp]) == ["tcp"]
    assert order([shm, tcp], [Endpoint("shm", "b"), Endpoint("tcp", "b")]) == ["tcp"]
    assert order([nixl], [Endpoint("nixl", "b")]) == [], "RDMA must be announced"
    unknown = Endpoint("another", "a")
    assert order([unknown, tcp], [unknown, tcp]) == ["tcp", "another"]


def test_the_reason_distinguishes_one_host_from_two() -> None:
    [near] = rank_backends([Endpoint("nixl", "a")], [Endpoint("nixl", "a")], None)
    [far] = rank_backends([Endpoint("nixl", "a", rdma=True)], [Endpoint("nixl", "b", rdma=True)], None)
    assert (near.reason[:9], far.reason) == ("same host", "both hosts have RDMA")


def test_the_usual_transports_leave_out_what_tls_does_not_cover() -> None:
    assert usual(under_tls=False) == ("shm", "nixl", "tcp")
    assert usual(under_tls=True) == ("shm", "tcp")


def test_between_hosts_those_that_reach_all_come_first() -> None:
    assert far_first() == ("memory", "tcp", "nixl")
