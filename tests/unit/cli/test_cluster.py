import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from triptych import demo
from triptych.cli import cluster as module
from triptych.cli import process_plan
from triptych.cli.cluster import LocalCluster
from triptych.cli.outcome import ClusterError
from triptych.cli.up import up
from triptych.domain.scaling import PoolName, ProcessPhase
from triptych.domain.stage import Role
from triptych.rpc.stubs import ScalerStub

pytestmark = pytest.mark.slow
NAMES = ["pool-manager", "encoder-1", "encoder-2", "text-1", "router", "gateway"]
Make = Callable[..., LocalCluster]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """A cluster of stub processes; flags by service."""
    monkeypatch.setattr(process_plan, "package_of", lambda service: "tests.unit.cli.stub_service")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def build(
        *,
        roles: str = "E:2,PD:1",
        mount_router: bool = False,
        switch_roles: bool = False,
        admin_port: int = 0,
        start_timeout_s: float = 120,
        restart: bool = False,
        autoscale: bool = False,
        models: tuple[str | Path, ...] = ("demo",),
        **options: tuple[str, ...],
    ) -> LocalCluster:
        gateway = ("--instances", "encoder-1,encoder-2,text-1")
        return LocalCluster(
            models,
            roles=roles,
            drain_s=0.1,
            admin_port=admin_port,
            mount_router=mount_router,
            switch_roles=switch_roles,
            start_timeout_s=start_timeout_s,
            restart=restart,
            autoscale=autoscale,
            first_backoff_s=0.05,
            options={"gateway": gateway, **options},
        )

    return build


def is_running(path: Path) -> bool:
    return path.exists()


async def test_a_cluster_runs_inside_its_context_only(make: Make) -> None:
    async with make() as cluster:
        pids = dict(cluster.processes)
        log_dir = cluster.log_dir
        assert list(pids) == NAMES
        assert all(psutil.pid_exists(pid) for pid in pids.values())
        assert len(set(cluster.targets.values())) == len(NAMES)
        assert cluster.url == f"http://{cluster.targets['gateway']}"
    assert cluster.processes == {}
    assert not any(psutil.pid_exists(pid) for pid in pids.values())
    assert not is_running(log_dir), "the logs of a run without failures are of no use"


async def test_every_process_gets_the_addresses_it_needs(make: Make) -> None:
    async with make() as cluster:
        commands = {name: psutil.Process(pid).cmdline() for name, pid in cluster.processes.items()}
        for name in ("encoder-1", "encoder-2", "text-1", "router"):
            assert commands[name][commands[name].index("--pool-manager") + 1] == cluster.manager_target
        assert cluster.targets["encoder-1"] not in commands["text-1"], "tickets say where encoders are"
        assert cluster.router_target in commands["gateway"]


async def test_instances_but_encoders_are_text_processes_with_a_role(make: Make) -> None:
    told = ("--instances", "encoder-1,text-1,hybrid-1,hybrid-2")
    async with make(roles="E:1,PD:1,EPD:2", gateway=told, text=("--extra",)) as cluster:
        commands = {name: psutil.Process(pid).cmdline() for name, pid in cluster.processes.items()}
        at = cluster.targets
        assert list(at) == ["pool-manager", "encoder-1", "text-1", "hybrid-1", "hybrid-2", "router", "gateway"]

        def flag(name: str, flag: str) -> str:
            command: list[str] = commands[name]
            return command[command.index(flag) + 1]

        assert flag("hybrid-1", "--role") == flag("hybrid-2", "--role") == "EPD"
        assert flag("hybrid-1", "--pool-manager") == at["pool-manager"]
        assert all("--extra" in commands[name] for name in ("text-1", "hybrid-1", "hybrid-2"))
        assert flag("text-1", "--role") == "PD"
        assert "--role" not in commands["encoder-1"]


async def test_the_consequence_of_losing_a_hybrid_process_depends_on_the_remaining_ones(make: Make) -> None:
    for roles, names, kinds in (
        ("EPD:1", "hybrid-1", "last text instance"),
        ("PD:1,EPD:1", "text-1,hybrid-1", "last encoder"),
        ("E:1,EPD:1", "encoder-1,hybrid-1", "last text instance"),
        ("E:1,D:1,EPD:1", "encoder-1,decode-1,hybrid-1", "last prefill instance"),
        ("E:1,PD:1,EPD:1", "encoder-1,text-1,hybrid-1", ""),
    ):
        async with make(roles=roles, gateway=("--instances", names)) as cluster:
            cluster.kill("hybrid-1")
            consequence = cluster.consequence(await cluster.next_exit())
        assert kinds in consequence
        assert bool(kinds) == bool(consequence)


async def test_an_instance_that_is_still_starting_does_not_stand_in_for_the_last_one(
    make: Make, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    told = ("--instances", "encoder-1,text-1,text-2")
    async with (
        asyncio.timeout(60),
        make(roles="E:1,PD:2", restart=True, gateway=told, text=("--slow-if", str(slow))) as cluster,
    ):
        slow.touch()
        before = cluster.processes["text-1"]
        cluster.kill("text-1")
        assert cluster.consequence(await cluster.next_exit()) == ""
        while cluster.processes.get("text-1", before) == before:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
        cluster.kill("text-2")
        assert "last text instance" in cluster.consequence(await cluster.next_exit())


def test_a_cluster_without_a_stage_is_refused(make: Make) -> None:
    with pytest.raises(ClusterError, match="--roles E:1,P:1: nothing would decode"):
        make(roles="E:1,P:1")


def test_a_cluster_in_which_nothing_could_switch_is_refused(make: Make) -> None:
    with pytest.raises(ClusterError, match=r"--switch-roles moves instances .*; there will be E, PD$"):
        make(roles="E:1,PD:1", switch_roles=True)


async def test_a_mounted_router_is_in_the_gateway_with_its_options(make: Make) -> None:
    async with make(mount_router=True, router=("--max-choices", "3")) as cluster:
        assert list(cluster.processes) == ["pool-manager", "encoder-1", "encoder-2", "text-1", "gateway"]
        command = psutil.Process(cluster.processes["gateway"]).cmdline()
        (mount,) = (shlex.split(flag.split("=", 1)[1]) for flag in command if flag.startswith("--mount-router="))
    assert mount[mount.index("--pool-manager") + 1] == cluster.manager_target
    assert mount[mount.index("--port") + 1] == cluster.router_target.rsplit(":", 1)[1]
    assert mount[-2:] == ["--max-choices", "3"]


async def test_a_process_that_dies_while_starting_is_named_with_its_last_output(make: Make) -> None:
    cluster = make(text=("--broken",), gateway=("--instances", "encoder-1,encoder-2"))
    with pytest.raises(ClusterError, match=r"text-1 ended with status 1 .*\n.*there is nothing to serve"):
        async with cluster:
            pass
    assert cluster.processes == {}
    assert "nothing to serve" in cluster.log_tail("text-1"), "kept, as something failed"


@pytest.mark.parametrize("service", ["encoder", "gateway"])
async def test_a_foreign_process_on_an_admin_port_is_an_error(make: Make, service: str) -> None:
    """For example another cluster that took the port first."""
    instances = ("--instances", "encoder-1,encoder-2,text-1")
    cluster = make(**{service: (*instances, "--pid", "1")})
    with pytest.raises(ClusterError, match=rf"another process answers at .*, the admin port of {service}"):
        async with cluster:
            pass
    assert cluster.processes == {}


async def test_an_instance_unknown_to_the_gateway_is_not_ready(make: Make) -> None:
    cluster = make(gateway=("--instances", "encoder-1,text-1"))
    ready: list[str] = []
    cluster.on_ready = ready.append
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(cluster.__aenter__())
        while len(ready) < 5:  # noqa: ASYNC110 - what a person would see
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        starting.cancel()
    assert sorted(ready) == ["encoder-1", "encoder-2", "pool-manager", "router", "text-1"]
    assert cluster.processes == {}


async def test_a_process_that_does_not_become_ready_in_time_is_named(make: Make) -> None:
    with pytest.raises(ClusterError, match=r"not ready after 0\.01 s; pool-manager: .*; gateway: .*; logs are in"):
        async with make(start_timeout_s=0.01):
            pass


async def test_admin_ports_can_be_chosen(make: Make) -> None:
    first = 21_000 + os.getpid() % 5000
    async with make(admin_port=first) as cluster:
        urls = [f"http://127.0.0.1:{first + number}" for number in range(6)]
        assert dict(cluster.admin_urls) == dict(
            zip(["gateway", "router", "pool-manager", "encoder-1", "encoder-2", "text-1"], urls, strict=True)
        )
    with pytest.raises(ClusterError, match="6 processes need as many consecutive ports"):
        make(admin_port=65_533)


@pytest.mark.parametrize(
    ("operators", "host", "devices"), [(None, (), "lo"), ("eth0", (), "eth0"), (None, ("--host", "127.0.0.2"), None)]
)
async def test_ucx_uses_the_loopback_device_by_default(
    make: Make, monkeypatch: pytest.MonkeyPatch, operators: str | None, host: tuple[str, ...], devices: str | None
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    if operators is not None:
        monkeypatch.setenv("UCX_NET_DEVICES", operators)
    async with make(encoder=host) as cluster:
        environment = psutil.Process(cluster.processes["encoder-1"]).environ()
    assert environment.get("UCX_NET_DEVICES") == devices
    assert environment["PATH"] == os.environ["PATH"]  # noqa: TID251


async def test_logs_are_kept_only_when_a_process_failed(make: Make) -> None:
    with pytest.raises(KeyError):
        async with make() as cluster:
            raise KeyError
    assert cluster.kept_logs is None
    assert not is_running(cluster.log_dir)
    async with make(restart=True, encoder=("--ends-well",)) as cluster:
        psutil.Process(cluster.processes["encoder-1"]).terminate()  # as an operator ends what has drained
        assert (await cluster.next_exit()).code == 0
    assert cluster.kept_logs is None
    async with make() as cluster:
        cluster.kill("encoder-1")
        await cluster.next_exit()
    assert cluster.kept_logs == cluster.log_dir


def test_an_unusable_log_directory_is_one_error_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cluster = LocalCluster(log_dir=tmp_path / "file" / "logs")
    with pytest.raises(ClusterError, match=r"cannot start .*/file.*: Not a directory"):
        asyncio.run(cluster.__aenter__())


async def test_a_killed_process_is_reported_and_the_others_keep_running(make: Make) -> None:
    async with make() as cluster:
        cluster.kill("encoder-2")
        ended = await cluster.next_exit()
        assert (ended.name, ended.code) == ("encoder-2", -signal.SIGKILL)
        assert str(ended) == "encoder-2 was killed by SIGKILL"
        assert list(cluster.processes) == ["pool-manager", "encoder-1", "text-1", "router", "gateway"]


async def test_a_process_that_does_not_drain_in_time_is_killed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KILL_MARGIN_S", 0.2)
    async with make(router=("--stubborn",)) as cluster:
        pid = cluster.processes["router"]
    assert not psutil.pid_exists(pid)


def test_no_process_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.cli.parent", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) == 5
        parent.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"is not a model: there is no config\.json in it"):
        LocalCluster(tmp_path)


def test_an_argument_that_a_cluster_does_not_have_is_refused() -> None:
    wrong: Any = {"encoder": 3}
    with pytest.raises(TypeError, match="a cluster has no encoder; its shape has roles, port"):
        LocalCluster(**wrong)


# --- triptych up ------------------------------------------------------------------------------------------------------


async def test_up_starts_again_whatever_dies(make: Make) -> None:
    cluster, out = make(restart=True), StringIO()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(up(cluster, Console(file=out, width=200)))
        while "try:" not in out.getvalue():  # noqa: ASYNC110 - what a person would see
            await asyncio.sleep(0.02)
        before, targets = dict(cluster.processes), dict(cluster.targets)
        for name in NAMES:
            cluster.kill(name)
            while f"{name} is ready\n" not in out.getvalue():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        after = dict(cluster.processes)
        assert cluster.targets == targets, "the same ports"
        signal.raise_signal(signal.SIGTERM)
    assert running.result() == 0
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    shown = out.getvalue()
    for name in NAMES:
        assert f"{name} was killed by SIGKILL; its log is" in shown
        assert f"starting {name} (again: {name} was killed by SIGKILL)" in shown
    assert "that was the last text instance: all requests wait or fail until there is one" in shown
    assert (
        "new requests fail until the router is back; answers that have begun pause, and go on if it is within 10 s"
        in shown
    )
    assert "\nrequests fail until the gateway is back" in shown
    assert cluster.processes == {}
    assert not any(psutil.pid_exists(pid) for pid in after.values())


@pytest.mark.parametrize(("service", "status"), [("encoder", 0), ("router", 1)])
async def test_up_gives_up_a_process_that_crashes_at_each_start_and_says_so(
    make: Make, tmp_path: Path, service: str, status: int
) -> None:
    broken = tmp_path / "broken"
    cluster, out = make(restart=True, **{service: ("--broken-if", str(broken))}), StringIO()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(up(cluster, Console(file=out, width=200)))
        while "try:" not in out.getvalue():  # noqa: ASYNC110 - what a person would see
            await asyncio.sleep(0.02)
        broken.touch()
        cluster.kill("encoder-2" if service == "encoder" else "router")
        while "gave up after 3 crashes at the start" not in out.getvalue():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if status == 0:
            assert [name for name in NAMES if name not in cluster.processes] == ["encoder-2"]
            signal.raise_signal(signal.SIGTERM)
    assert running.result() == status
    assert out.getvalue().count("ended with status 1; its log is") == 3
    assert ("the cluster cannot run without the router: stopping" in out.getvalue()) == (status == 1)
    assert cluster.processes == {}


async def until_said(out: StringIO, *lines: str) -> None:
    """Wait for what a person would see."""
    while any(line not in out.getvalue() for line in lines):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_the_manager_of_an_autoscaled_cluster_starts_and_stops_instances_and_up_says_so(make: Make) -> None:
    cluster, out = make(autoscale=True), StringIO()
    pool = PoolName(demo.MODEL_ID, Role.E)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(up(cluster, Console(file=out, width=200)))
        await until_said(out, "try:")
        manager = psutil.Process(cluster.processes["pool-manager"]).cmdline()
        scaler = ScalerStub(manager[manager.index("--scaler") + 1])
        assert {found.name: found.wanted for found in await scaler.pools()} == {
            pool: 2,
            PoolName(demo.MODEL_ID, Role.PD): 1,
        }
        await scaler.scale(pool, 3, 1)
        await until_said(out, "starting encoder-3 (3 wanted)", "encoder-3 is ready")
        command = psutil.Process(cluster.processes["encoder-3"]).cmdline()
        assert command[command.index("--instance-id") + 1] == "encoder-3"
        assert command[command.index("--pool-manager") + 1] == cluster.manager_target
        await scaler.scale(pool, 2, 1)
        await scaler.remove(pool, "encoder-1", 1)
        await until_said(out, "stopping encoder-1 (removed)", "encoder-1 has stopped")
        (found,) = [found for found in await scaler.pools() if found.name == pool]
        assert [(instance.name, instance.phase) for instance in found.instances] == [
            ("encoder-2", ProcessPhase.RUNNING),
            ("encoder-3", ProcessPhase.RUNNING),
        ]
        await scaler.close()
        signal.raise_signal(signal.SIGTERM)
    assert running.result() == 0
    assert "was killed" not in out.getvalue()
    assert cluster.processes == {}


async def test_instances_that_switch_are_started_again_and_joined_by_others_like_them(make: Make) -> None:
    told = ("--instances", "encoder-1,encoder-2,prefill-1,decode-1")
    async with (
        asyncio.timeout(60),
        make(roles="E:2,P:1,D:1", switch_roles=True, autoscale=True, gateway=told) as cluster,
    ):
        before = cluster.processes["encoder-1"]
        manager = psutil.Process(cluster.processes["pool-manager"]).cmdline()
        assert "--switch-roles" in manager
        scaler = ScalerStub(manager[manager.index("--scaler") + 1])
        await scaler.scale(PoolName(demo.MODEL_ID, Role.E), 3, 1)
        await scaler.close()
        cluster.kill("encoder-1")
        while cluster.processes.get("encoder-1", before) == before or "encoder-3" not in cluster.processes:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        for name in ("encoder-1", "encoder-2", "encoder-3"):
            command = psutil.Process(cluster.processes[name]).cmdline()
            assert command[command.index("--role") :][:4] == ["--role", "E", "--switchable", "EPD"]
        event = await cluster.next_exit()
        assert cluster.consequence(event) == "", "others may encode by now"


@pytest.mark.parametrize(
    ("restart", "autoscale", "flags"),
    [(False, False, set()), (True, False, {"--scaler"}), (True, True, {"--scaler", "--autoscale"})],
)
async def test_the_manager_decides_on_sizes_only_if_asked_to(
    make: Make, *, restart: bool, autoscale: bool, flags: set[str]
) -> None:
    """By default it carries out sizes that were set by hand."""
    async with make(restart=restart, autoscale=autoscale) as cluster:
        command = psutil.Process(cluster.processes["pool-manager"]).cmdline()
        assert {"--scaler", "--autoscale"} & set(command) == flags


async def test_a_dead_manager_stops_no_instance_and_what_dies_meanwhile_is_replaced(make: Make) -> None:
    async with asyncio.timeout(60), make(autoscale=True) as cluster:
        manager = psutil.Process(cluster.processes["pool-manager"]).cmdline()
        scaler = ScalerStub(manager[manager.index("--scaler") + 1])
        pool = PoolName(demo.MODEL_ID, Role.E)
        await scaler.scale(pool, 3, 7)

        async def running(*wanted: str) -> None:
            while not set(wanted) <= cluster.processes.keys():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)

        await running("encoder-3")
        before = dict(cluster.processes)
        cluster.kill("pool-manager")
        cluster.kill("encoder-2")
        while {**before, **cluster.processes}["encoder-2"] == before["encoder-2"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await running("pool-manager", "encoder-1", "encoder-2", "encoder-3")
        (found,) = [found for found in await scaler.pools() if found.name == pool]
        assert found.wanted == 3, "the next manager reads what is wanted"
        await scaler.close()


SECOND = "Other Digits!=demo"
"""The demo model under another name."""


async def test_two_models_have_instances_and_a_router_each_and_share_gateway_and_manager(
    make: Make,
) -> None:
    first = demo.MODEL_ID
    of_first = [f"{first}-encoder-1", f"{first}-encoder-2", f"{first}-text-1"]
    of_second = ["other-digits-encoder-1", "other-digits-encoder-2", "other-digits-text-1"]
    told = ("--instances", ",".join((*of_first, *of_second)))
    async with make(models=("demo", SECOND), autoscale=True, gateway=told) as cluster:
        routers = [f"{first}-router", "other-digits-router"]
        assert list(cluster.processes) == ["pool-manager", *of_first, *of_second, *routers, "gateway"]
        commands = {name: psutil.Process(pid).cmdline() for name, pid in cluster.processes.items()}
        for name, command in commands.items():
            if name not in ("pool-manager", "gateway"):
                model_id = "Other Digits!" if name.startswith("other") else first
                assert command[command.index("--model-id") + 1] == model_id
                assert command[command.index("--instance-id") + 1] == name
                assert command[command.index("--pool-manager") + 1] == cluster.manager_target
        gateway = commands["gateway"]
        assert gateway[gateway.index("--router") + 1] == ",".join(cluster.targets[name] for name in routers)
        assert cluster.router_target == cluster.targets[routers[0]]
        assert cluster.router_targets == {
            first: cluster.targets[routers[0]],
            "Other Digits!": cluster.targets[routers[1]],
        }
        pool = PoolName("Other Digits!", Role.E)
        await cluster.scaler.scale(pool, 3, 1)
        async with asyncio.timeout(60):
            while "other-digits-encoder-3" not in cluster.processes:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
        command = psutil.Process(cluster.processes["other-digits-encoder-3"]).cmdline()
        assert command[command.index("--model-id") + 1] == "Other Digits!"
        cluster.kill("other-digits-text-1")
        told_of = cluster.consequence(await cluster.next_exit())
        assert (
            told_of == "that was the last text instance: all requests for Other Digits! wait or fail until there is one"
        )
        cluster.kill(routers[0])
        told_of = cluster.consequence(await cluster.next_exit())
        assert told_of.startswith(f"new requests for {first} fail until the {routers[0]} is back")
        assert cluster.vital == {"gateway"}, "the other model goes on"


def test_models_that_would_have_the_same_name_are_refused() -> None:
    with pytest.raises(ClusterError, match=f"two models would be served as {demo.MODEL_ID}"):
        LocalCluster(("demo", "demo"))
    with pytest.raises(ClusterError, match="name at least one model"):
        LocalCluster(())
    with pytest.raises(ClusterError, match="--mount-router serves one model"):
        LocalCluster(("demo", SECOND), mount_router=True)
    names = list(LocalCluster((SECOND, "mine/other-digits=demo"), roles="E:1,PD:1").targets)
    assert names[1:3] == ["other-digits-encoder-1", "other-digits-text-1"]
    assert names[3:5] == ["other-digits-2-encoder-1", "other-digits-2-text-1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_up_stops_its_processes_in_order(make: Make, number: signal.Signals) -> None:
    cluster, out = make(), StringIO()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(up(cluster, Console(file=out, width=200)))
        while "try:" not in out.getvalue():  # noqa: ASYNC110 - what a person would see
            await asyncio.sleep(0.02)
        signal.raise_signal(number)
    assert running.result() == 0
    assert out.getvalue().startswith("starting pool-manager, encoder-1, encoder-2, text-1, router, gateway ...\n")
    for name in NAMES:
        metrics = f"{cluster.admin_urls[name]}/metrics"
        assert re.search(
            rf"^  {name} +ready after +\d.* {cluster.targets[name]} .*{metrics}$", out.getvalue(), re.MULTILINE
        )
    assert out.getvalue().endswith("stopped\n")
    assert cluster.processes == {}


@pytest.fixture
def _hangups_are_not_ignored() -> Iterator[None]:
    """As if the tests did not run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_hangups_are_not_ignored")
async def test_up_prints_the_log_directory_after_a_failure(make: Make) -> None:
    cluster, out = make(), StringIO()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(up(cluster, Console(file=out, width=200)))
        while "try:" not in out.getvalue():  # noqa: ASYNC110 - what a person would see
            await asyncio.sleep(0.02)
        cluster.kill("encoder-1")
        while "5 processes continue" not in out.getvalue():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        signal.raise_signal(signal.SIGHUP)
    assert running.result() == 0
    assert f"a process failed: the logs of all are in {cluster.log_dir}" in out.getvalue()
    assert {path.name for path in cluster.log_dir.iterdir()} == {f"{name}.log" for name in NAMES}


async def test_up_on_a_terminal_shows_running_and_dead_processes(make: Make, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    instances = ("--instances", "encoder-1,encoder-2,text-1")
    cluster, out = make(restart=True, gateway=(*instances, "--broken-if", str(broken))), StringIO()
    console = Console(file=out, width=150, force_terminal=True)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(up(cluster, console, live=True))
        while "Ctrl-C stops" not in out.getvalue():  # noqa: ASYNC110 - what a person would see
            await asyncio.sleep(0.02)
        cluster.kill("encoder-1")
        while "encoder-1 is ready" not in out.getvalue():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        broken.touch()
        cluster.kill("gateway")
    assert running.result() == 1
    assert "encoder-1 was killed by SIGKILL" in out.getvalue()
    assert "the cluster cannot run without the gateway: stopping" in out.getvalue()
    assert cluster.processes == {}
