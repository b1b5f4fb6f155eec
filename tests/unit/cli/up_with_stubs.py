"""``triptych up``, with stubs in place of the services."""

from triptych.cli import plan
from triptych.cli.main import main

plan.package_of = lambda service: "tests.unit.cli.stub_service"
main()
